"""Attention of whole rows and long prefixes, by FlashAttention or torch: packed, own keys, ragged, split."""
