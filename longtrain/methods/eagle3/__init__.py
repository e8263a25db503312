"""EAGLE-3 and 3.1: a one-layer draft that reads three levels of the target (arXiv 2503.01840)."""
