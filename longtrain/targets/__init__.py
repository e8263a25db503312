"""The frozen language models: loading, forwards through our caches, fused layers and 4-bit weights."""
