"""Prepared data on disk, and the packed sequences that training reads from it."""
