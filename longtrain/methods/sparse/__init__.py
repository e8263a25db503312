"""Selection rules without training for the KV entries that a step reads: other papers', and oracles."""
