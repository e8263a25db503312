"""RULER's string-match metrics: the share of the expected strings that an answer contains."""

from __future__ import annotations

import re
from collections.abc import Sequence

CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """Strip outer white space, replace control characters by line breaks, and strip again.

    Source: RULER, `postprocess_pred`. kvpress deletes the control characters instead.
    """
    return CONTROL.sub("\n", prediction.strip()).strip()


def match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the prediction, case ignored; for every task but question answering.

    Args:
        prediction: the answer after `clean`.
        answers: one or more.

    Source: RULER, `string_match_all`.
    """
    return sum(_found(prediction, answers)) / len(answers)


def match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if any of the answers occurs in the prediction, case ignored, else 0; for the question answering
    tasks.

    Arguments are those of `match_all`.

    Source: RULER, `string_match_part`.
    """
    return float(any(_found(prediction, answers)))


def percent(scores: Sequence[float]) -> float:
    """A task's score: 100 times the mean, rounded to 2 digits.

    Note: summed from left to right, as Python before 3.12 does.
    """
    total = 0.0
    for score in scores:
        total += score
    return round(total / len(scores) * 100, 2)


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    text = prediction.lower()
    return [answer.lower() in text for answer in answers]
