"""The metrics of LongBench, beside ROUGE-L: F1 of words, classes, paragraphs and numbers, lines of code.

They are equal to `metrics.py` of LongBench, oddities included.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from longtrain.errors import DataError

MARKS = ("`", "#", "//")
"""A line that holds one of these is taken for a comment or a code fence."""
NUMBER = re.compile(r"\d+")
PARAGRAPH = re.compile(r"Paragraph (\d+)")
ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE = str.maketrans("", "", string.punctuation)


def without_articles(text: str) -> str:
    """Lower case, ASCII punctuation deleted (not replaced by spaces), then articles replaced by spaces."""
    return ARTICLES.sub(" ", text.lower().translate(_DELETE))


def token_f1(prediction: str, answer: str) -> float:
    """F1 of two bags of normalised words; 0 if they share none, so also if both are empty.

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

    Classes that are part of the right one's name are taken off the list first, except that the official loop
    removes from the list it runs over and so never looks at the class that follows a removed one.

    Args:
        prediction: what was generated.
        answer: the right class.
        classes: all classes, in the official order, which the oddity above depends on.

    Source: LongBench, `classification_score`.
    """
    named = [name for name in classes if name in prediction]
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            named.remove(named[at])  # the first that is equal, which need not be the one at `at`
        at += 1
    return 1.0 / len(named) if answer in named else 0.0


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


def count(prediction: str, answer: str) -> float:
    """Share of the prediction's numbers that are written as the answer is; 0 without a number.

    Digits of any script count as such, and numbers are compared as strings: "07" is not "7".

    Source: LongBench, `count_score`.
    """
    numbers = NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """`count` against the number of the first "Paragraph N" in the answer.

    Raises:
        DataError: the answer names no paragraph.

    Source: LongBench, `retrieval_score`.
    """
    found = PARAGRAPH.search(answer)
    if found is None:
        raise DataError(f"answer {answer!r} names no paragraph; it must hold e.g. 'Paragraph 7'")
    return count(prediction, found[1])
