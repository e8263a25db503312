"""Measurements of speed and memory; a figure goes nowhere without the JSON that it came in."""
