"""Measurements of speed and memory (`longtrain bench`); every published number has a JSON file."""
