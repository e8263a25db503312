"""Pretrains the small reference target and its tokenizer from scratch."""
