"""Attention of whole rows and long prefixes, by FlashAttention or torch: packed, ragged and split."""
