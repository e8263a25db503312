"""The share of numbers in an answer that are the right one, as LongBench scores its synthetic tasks."""

from __future__ import annotations

import re

from longtrain.errors import DataError

NUMBER = re.compile(r"\d+")
PARAGRAPH = re.compile(r"Paragraph (\d+)")


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
