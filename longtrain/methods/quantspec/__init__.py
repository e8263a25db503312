"""QuantSpec: the target drafts for itself, on 4-bit weights and the upper half of an 8-bit KV cache."""
