"""LongBench-Write's judging: six dimensions of quality from 1 to 5, beside how near a text is to its length.

Source: Bai et al., LongWriter, 2408.07055; THUDM/LongWriter, eval_quality.py, eval_length.py, pred.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from longtrain.evaluation.judge.rubric import Json, Question, Rubric, conversation, without_thoughts

if TYPE_CHECKING:
    from longtrain.evaluation.task import Example

DIMENSIONS = ("Relevance", "Accuracy", "Coherence", "Clarity", "Breadth and Depth", "Reading Experience")
LOWEST, HIGHEST = 1, 5

_FENCE = re.compile(r"```json\n(.*?)\n```", re.DOTALL)
_CHARACTER = re.compile(r"[\u4e00-\u9fff]")
_WORD = re.compile(r"\b[a-zA-Z]+\b")


class LongWrite(Rubric):
    """Marks a text in six dimensions."""

    def questions(self, example: Example, texts: Sequence[str]) -> list[Question]:
        """One question for the whole text."""
        system, template = self.prompts.texts["judge"]
        filled = template.replace("$INST$", str(example.fields["prompt"])).replace("$RESPONSE$", texts[0])
        return [Question("text", conversation(system, filled))]

    def parse(self, reply: str) -> Json | None:
        """The six marks of a reply that is JSON, alone or in a fence.

        As in the official reader, line breaks are removed before JSON is read, and text around JSON without a
        fence makes it unreadable. Note: marks outside of 1 to 5 make a reply unreadable too.
        """
        text = without_thoughts(reply)
        if "```json" in text:
            found = _FENCE.search(text)
            text = found.group(1) if found else ""
        try:
            values = json.loads(text.replace("\n", ""))
            marks = {name: _mark(values[name]) for name in DIMENSIONS}
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return marks

    def score(self, example: Example, texts: Sequence[str], marks: Sequence[Json | None]) -> float | None:
        """The mean of quality and length score, as a share of 100."""
        mark = marks[0]
        if mark is None:
            return None
        return (quality([mark]) + length_score(required(example), count_words(texts[0]))) / 200


def required(example: Example) -> int:
    """Words that an example asks for."""
    return int(example.fields["length"])


def count_words(text: str) -> int:
    """Chinese characters and words of Latin letters."""
    return len(_CHARACTER.findall(text)) + len(_WORD.findall(text))


def length_score(wanted: int, written: int) -> float:
    """100 for a text of the wanted length, 0 for one four times as long or a third as long.

    Note: an empty text gets 0; the official formula divides by zero there.
    """
    if written == 0:
        return 0.0
    if written > wanted:
        return 100 * max(0.0, 1 - (written / wanted - 1) / 3)
    return 100 * max(0.0, 1 - (wanted / written - 1) / 2)


def dimension_means(marks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The raw mean of each dimension, 1 to 5; `marks` must not be empty."""
    return {name: sum(mark[name] for mark in marks) / len(marks) for name in DIMENSIONS}


def quality(marks: Sequence[Mapping[str, float]]) -> float:
    """S_q: the dimensions' means, moved from 1..5 to 0..100, and their mean."""
    return sum((mean - 1) * 25 for mean in dimension_means(marks).values()) / len(DIMENSIONS)


def figures(marks: Sequence[Mapping[str, float] | None], lengths: Sequence[tuple[int, int]]) -> Json:
    """The benchmark's figures; those of quality are over the texts that were marked, None if there is none.

    The raw means and their plain mean are what SpeContext's table 4 has.

    Args:
        marks: of each text.
        lengths: words wanted and written, of each text.
    """
    there = [mark for mark in marks if mark is not None]
    means = dimension_means(there) if there else None
    length = sum(length_score(wanted, written) for wanted, written in lengths) / len(lengths)
    marked = quality(there) if there else None
    return {
        "score": (marked + length) / 2 if marked is not None else None,
        "quality": marked,
        "length": length,
        "marked": len(there),
        "dimensions": means,
        "dimensions_mean": sum(means.values()) / len(means) if means else None,
        "words": sum(written for _, written in lengths) / len(lengths),
    }


def _mark(value: object) -> float:
    """A mark as a number; digits in quotes count, as in the official reader.

    Raises:
        ValueError: no number from 1 to 5.
        TypeError: of another type.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is no mark")
    mark = float(value)
    if not math.isfinite(mark) or not LOWEST <= mark <= HIGHEST:
        raise ValueError(f"{mark} is no mark from {LOWEST} to {HIGHEST}")
    return mark
