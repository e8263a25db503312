"""Reads what a target's folder or GGUF file stores: files, quantised weights, and names of tensors."""
