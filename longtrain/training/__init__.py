"""Trains a module against a frozen target: optimiser, loop, checkpoints, metrics and their files."""
