"""Trains a module against a frozen target: optimizer, loop, checkpoints, figures and their files."""
