"""F1 of the words two answers share, as LongBench scores question answering."""

from __future__ import annotations

import re
import string
from collections import Counter

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
