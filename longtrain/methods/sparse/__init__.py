"""Rules without training that choose which rows each step reads: other papers' selections, and oracles."""
