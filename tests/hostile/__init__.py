"""Hostile files: everything that longtrain wrote is changed at random, and nothing may be silently other."""
