"""Evaluation: suites define tasks, the harness runs them, `analysis` computes scores, `reporting` writes
reports.
"""
