"""The metrics of published benchmarks, equal to their official scorers digit for digit, one metric a file.

Each takes a prediction and one answer and gives a score from 0 to 1, unless it says otherwise. Where an
official definition is odd, the oddity is kept and named: only scores computed the same way can be compared.
"""
