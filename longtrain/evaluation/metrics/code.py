"""How alike two lines of code are, as LongBench scores code completion."""

from __future__ import annotations

from difflib import SequenceMatcher

MARKS = ("`", "#", "//")
"""A line that holds one of these is taken for a comment or a code fence."""


def edit_similarity(prediction: str, answer: str) -> float:
    """Similarity of the prediction's first line of code and the answer, in hundredths.

    Source: LongBench, `code_sim_score`.
    """
    return percent_alike(first_code_line(prediction), answer) / 100


def first_code_line(text: str) -> str:
    """The first line that holds none of `MARKS`, leading line breaks dropped; empty if there is none."""
    lines = text.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in MARKS)), "")


def percent_alike(a: str, b: str) -> int:
    """Whole percent of characters in matching blocks; 100 if equal, 0 if one alone is empty.

    Order matters, and characters that are frequent in a long `b` are ignored (difflib's heuristic). Halves
    are rounded to even.

    Source: PyPI fuzzywuzzy 0.18.0, `fuzz.ratio`, without python-Levenshtein, which gives other values.
    """
    if a == b:
        return 100
    if not a or not b:
        return 0
    return round(100 * SequenceMatcher(None, a, b).ratio())
