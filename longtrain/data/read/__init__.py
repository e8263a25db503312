"""Brings corpora, local files and tokenizers in: from disk or the Hub to documents."""
