"""Stores the frozen target's outputs for each document on disk, so that later epochs skip its forward."""
