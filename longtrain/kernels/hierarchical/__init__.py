"""QuantSpec's hierarchical INT4/INT8 KV cache: its layout, quantising blocks, and attention over them."""
