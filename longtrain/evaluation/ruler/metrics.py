"""RULER's two metrics, with the official clean-up of predictions.

Source: NVIDIA/RULER, scripts/eval: `postprocess_pred`, `string_match_all`, `string_match_part`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from longtrain.errors import ConfigError, DataError

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """A prediction as the official scorer sees it: stripped, control characters as line ends."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """The share of answers that stand in a prediction (cleaned), whatever their case.

    Raises:
        DataError: no answers.
    """
    _check(answers)
    lower = prediction.lower()
    return sum(1.0 for answer in answers if answer.lower() in lower) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """Whether any answer stands in a prediction (cleaned), whatever its case: 1 or 0.

    Raises:
        DataError: no answers.
    """
    _check(answers)
    lower = prediction.lower()
    return max(1.0 if answer.lower() in lower else 0.0 for answer in answers)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
}


def score(metric: str, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """A task's score as RULER reports it: the mean over examples in percent, two digits.

    Args:
        metric: `string_match_all` or `string_match_part`.
        predictions: raw answers; they are cleaned here.
        references: the answers of each example.

    Raises:
        ConfigError: no such metric.
        DataError: no examples, other counts of predictions and references, or an example without answers.
    """
    if metric not in METRICS:
        raise ConfigError(f"unknown RULER metric '{metric}'; known: {', '.join(METRICS)}")
    if not predictions or len(predictions) != len(references):
        raise DataError(
            f"{len(predictions)} predictions for {len(references)} references; allowed: as many, one or more"
        )
    pairs = zip(predictions, references, strict=True)
    marks = [METRICS[metric](clean(prediction), answers) for prediction, answers in pairs]
    total = 0.0
    for mark in marks:  # from left to right: `sum` rounds otherwise from Python 3.12 on
        total += mark
    return round(total / len(marks) * 100, 2)


def _check(answers: Sequence[str]) -> None:
    if not answers:
        raise DataError("a RULER example has no answers ('outputs' is empty); allowed: one or more")
