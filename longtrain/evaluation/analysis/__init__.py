"""Computes results from records: numbers of each record, confidence intervals, metrics of systems,
comparisons.
"""
