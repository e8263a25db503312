"""Prompt look-up: the draft is what followed the text's last tokens when they stood there before."""
