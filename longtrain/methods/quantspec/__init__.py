"""QuantSpec: the target drafts for itself, with 4-bit weights and the upper 4 bits of an 8-bit KV cache."""
