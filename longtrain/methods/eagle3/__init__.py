"""EAGLE-3 and 3.1: a one-layer draft that reads hidden states of three target layers (arXiv 2503.01840)."""
