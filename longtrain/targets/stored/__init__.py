"""What a target's folder or GGUF file stores: its files, quantised weights, and names of tensors."""
