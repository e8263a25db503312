"""The metrics of LongBench except ROUGE-L: F1 of words, classes, paragraphs and numbers, lines of code.

They are equal to `metrics.py` of LongBench, oddities included.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

MARKS = ("`", "#", "//")
"""Lines that contain one of these are taken for comments or code fences."""
NUMBER = re.compile(r"\d+")
PARAGRAPH = re.compile(r"Paragraph (\d+)")
ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE = str.maketrans("", "", string.punctuation)


def without_articles(text: str) -> str:
    """Normalise a text: lower case, ASCII punctuation deleted (not replaced by spaces), articles replaced by
    spaces.
    """
    return ARTICLES.sub(" ", text.lower().translate(_DELETE))


def token_f1(prediction: str, answer: str) -> float:
    """F1 of two bags of normalised words; 0 if they share none (also if both are empty).

    Source: LongBench, `qa_f1_score` (after SQuAD 1.1).
    """
    predicted, expected = without_articles(prediction).split(), without_articles(answer).split()
    shared = sum((Counter(predicted) & Counter(expected)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return (2 * precision * recall) / (precision + recall)


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes the prediction names if the right one is among them, else 0.

    Classes that are a substring of the right one are first removed from the list, except that the official
    loop removes from the list it iterates over and so skips the class after a removed one.

    Args:
        prediction: the generated text.
        answer: the right class.
        classes: all classes, in the official order, on which the oddity above depends.

    Source: LongBench, `classification_score`.
    """
    named = [name for name in classes if name in prediction]
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            named.remove(named[at])  # the first equal entry, which need not be the one at `at`
        at += 1
    return 1.0 / len(named) if answer in named else 0.0


def edit_similarity(prediction: str, answer: str) -> float:
    """Similarity of the prediction's first line of code and the answer, in steps of 0.01.

    Source: LongBench, `code_sim_score`.
    """
    return percent_alike(first_code_line(prediction), answer) / 100


def first_code_line(text: str) -> str:
    """The first line that contains none of `MARKS`, leading line breaks dropped; empty if there is none."""
    lines = text.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in MARKS)), "")


def percent_alike(a: str, b: str) -> int:
    """Percentage of characters in matching blocks, as an integer; 100 if equal, 0 if exactly one is empty.

    The order of `a` and `b` matters, and characters that are frequent in a long `b` are ignored (difflib's
    heuristic). Halves are rounded to even.

    Source: PyPI fuzzywuzzy 0.18.0, `fuzz.ratio`, without python-Levenshtein, whose values differ.
    """
    if a == b:
        return 100
    if not a or not b:
        return 0
    return round(100 * SequenceMatcher(None, a, b).ratio())


def count(prediction: str, answer: str) -> float:
    """Share of the prediction's numbers that equal the answer as strings; 0 if there is no number.

    Digits of any script count, and numbers are compared as strings: "07" is not "7".

    Source: LongBench, `count_score`.
    """
    numbers = NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """`count` against the number of the first "Paragraph N" in the answer, which has one.

    Source: LongBench, `retrieval_score`.
    """
    return count(prediction, PARAGRAPH.findall(answer)[0])
