"""Sparse decoding: selectors, which score the KV entries that each step reads."""
