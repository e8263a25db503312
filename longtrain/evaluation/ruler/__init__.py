"""RULER's 13 synthetic tasks at any length for any tokenizer, generated as the official release does."""
