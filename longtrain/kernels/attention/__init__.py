"""Attention of whole rows and long prefixes, by FlashAttention or torch: packed, with own keys, ragged, split."""
