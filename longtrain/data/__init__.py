"""Brings text and conversations to rows of tokens: read, render, prepare, pack and batch them."""
