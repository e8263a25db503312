"""Attention over packed sequences and long prefixes, by FlashAttention or torch."""
