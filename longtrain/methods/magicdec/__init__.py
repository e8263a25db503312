"""MagicDec: the target drafts for itself, with its own weights and a small part of its KV cache."""
