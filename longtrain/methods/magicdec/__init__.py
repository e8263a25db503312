"""MagicDec: the target drafts for itself, on its own weights and a small part of its KV cache."""
