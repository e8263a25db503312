"""The metrics of published benchmarks, equal to their official scorers digit for digit, one benchmark per
file.

Each takes a prediction and one answer and returns a score from 0 to 1, unless documented otherwise. If an
official definition is odd, the oddity is preserved and documented: only scores computed the same way can be
compared.
"""
