"""Predicts memory, bytes moved and floating-point operations from shapes and data sheets, without running."""
