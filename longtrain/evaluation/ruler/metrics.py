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
    """The share of answers that stand in a prediction, whatever their case."""
    lower = prediction.lower()
    return sum(1.0 for answer in answers if answer.lower() in lower) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """Whether any answer stands in a prediction, whatever its case: 1 or 0."""
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
    if not all(references):
        raise DataError("an example has no answers; allowed: one or more")
    pairs = zip(predictions, references, strict=True)
    return round(
        sum(METRICS[metric](clean(text), answers) for text, answers in pairs) / len(predictions) * 100, 2
    )
