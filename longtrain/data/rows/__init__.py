"""Prepared data on disk, and the packed rows that training reads from it."""
