"""Prompt look-up: drafts the tokens that followed an earlier occurrence of the text's last tokens."""
