"""What MT-Bench and LongBench-Write ask their judges, what is read from the replies, and the figures.

Sources: MT-Bench, Zheng et al., 2306.05685; FastChat, fastchat/llm_judge: common.py, show_result.py.
LongBench-Write, Bai et al., LongWriter, 2408.07055; THUDM/LongWriter, eval_quality.py, eval_length.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longtrain.errors import DataError

if TYPE_CHECKING:
    from longtrain.evaluation.judge.prompts import JudgePrompts
    from longtrain.evaluation.task import Example

Json = dict[str, Any]

NEED_REFERENCE = ("math", "reasoning", "coding")
"""Categories of MT-Bench whose answers are judged against a reference answer."""
HIGHEST_RATING = 10.0

DIMENSIONS = ("Relevance", "Accuracy", "Coherence", "Clarity", "Breadth and Depth", "Reading Experience")
"""What LongBench-Write's judge marks, each from 1 to 5."""
LOWEST_MARK, HIGHEST_MARK = 1, 5

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_RATING = re.compile(r"\[\[(\d+\.?\d*)\]\]", re.ASCII)
_SECOND_CHOICE = re.compile(r"\[(\d+\.?\d*)\]", re.ASCII)
_FENCE = re.compile(r"```json\n(.*?)\n```", re.DOTALL)
_CHARACTER = re.compile(r"[\u4e00-\u9fff]")
_WORD = re.compile(r"\b[a-zA-Z]+\b")


@dataclass(frozen=True)
class JudgeQuestion:
    """One question to the judge.

    Args:
        about: what is judged, e.g. `turn 1`.
        messages: the conversation that is sent.
    """

    about: str
    messages: tuple[Mapping[str, str], ...]

    @property
    def key(self) -> str:
        """A hash of the messages: equal answers of two systems are one question, asked once."""
        content = json.dumps([dict(message) for message in self.messages], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


class Rubric(ABC):
    """The judging side of a benchmark.

    Args:
        prompts: what the judge is told.
    """

    def __init__(self, prompts: JudgePrompts) -> None:
        self.prompts = prompts

    def settings(self) -> Json:
        """JSON values that marks follow from, beside the judge itself."""
        return {"prompts_sha256": self.prompts.sha256}

    @abstractmethod
    def questions(self, example: Example, texts: Sequence[str]) -> list[JudgeQuestion]:
        """What to ask about the answers to an example, one text a turn."""

    @abstractmethod
    def parse(self, reply: str) -> Json | None:
        """The mark in a judge's reply; None where there is none."""

    def tries_of(self, reply: str) -> int:
        """How many tries a reply without a mark counts for."""
        return 1

    @abstractmethod
    def score(self, example: Example, texts: Sequence[str], marks: Sequence[Json | None]) -> float | None:
        """An example's score, 0 to 1, from the marks of its questions; None if it cannot be said."""


class MtBenchRubric(Rubric):
    """Rates both turns of each question from 1 to 10.

    Args:
        prompts: the four prompts.
        references: question id -> reference answers of the two turns.
    """

    def __init__(self, prompts: JudgePrompts, references: Mapping[str, Sequence[str]]) -> None:
        super().__init__(prompts)
        self.references = references

    def settings(self) -> Json:
        """With the hash of the reference answers."""
        content = json.dumps({name: list(texts) for name, texts in self.references.items()}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()
        return {**super().settings(), "references_sha256": digest[:16]}

    def questions(self, example: Example, texts: Sequence[str]) -> list[JudgeQuestion]:
        """The first turn alone, then the whole conversation with its second turn.

        Raises:
            DataError: the category needs a reference answer and there is none.
        """
        turns = [str(turn) for turn in example.fields["turns"]]
        answers = [text.strip() for text in texts]
        values = {f"question_{turn}": text for turn, text in enumerate(turns, 1)}
        values |= {f"answer_{turn}": text for turn, text in enumerate(answers, 1)}
        kind = "single-v1"
        if example.fields["category"] in NEED_REFERENCE:
            kind = "single-math-v1"
            values |= self._references(example)
        first = {**values, "question": turns[0], "answer": answers[0]}
        return [
            self._question("turn 1", kind, first),
            self._question("turn 2", f"{kind}-multi-turn", values),
        ]

    def parse(self, reply: str) -> Json | None:
        """The first `[[7]]`, else the first `[7]`, as `{"rating": 7.0}`.

        Note: a number above 10 is no rating here; FastChat counts whatever number stands there.
        """
        text = without_thoughts(reply)
        found = _RATING.search(text) or _SECOND_CHOICE.search(text)
        rating = float(found.group(1)) if found else math.inf
        return {"rating": rating} if rating <= HIGHEST_RATING else None

    def score(self, example: Example, texts: Sequence[str], marks: Sequence[Json | None]) -> float | None:
        """The mean of the ratings there are, as a share of 10."""
        mean = _mean([float(mark["rating"]) for mark in marks if mark is not None])
        return None if mean is None else mean / HIGHEST_RATING

    def _references(self, example: Example) -> dict[str, str]:
        texts = self.references.get(example.id)
        if texts is None:
            raise DataError(
                f"question {example.id} ({example.fields['category']}) is judged against a reference answer, "
                "and there is none; pass suite.references=FILE (FastChat's reference_answer/gpt-4.jsonl)"
            )
        return {f"ref_answer_{turn}": text for turn, text in enumerate(texts, 1)}

    def _question(self, about: str, name: str, values: Mapping[str, str]) -> JudgeQuestion:
        system, template = self.prompts.texts[name]
        user = {"role": "user", "content": template.format(**values)}
        return JudgeQuestion(about, ({"role": "system", "content": system}, user) if system else (user,))


def mt_bench_figures(ratings: Sequence[tuple[str, Sequence[float | None]]]) -> Json:
    """The figures of MT-Bench, as FastChat prints them: means over all ratings there are.

    Args:
        ratings: the category and the two turns' ratings of each question.
    """
    by_turn: dict[str, list[float]] = {"turn 1": [], "turn 2": []}
    by_category: dict[str, list[float]] = {}
    for category, turns in ratings:
        for turn, rating in enumerate(turns, 1):
            if rating is not None:
                by_turn[f"turn {turn}"].append(rating)
                by_category.setdefault(category, []).append(rating)
    every = [rating for some in by_turn.values() for rating in some]
    return {
        "score": _mean(every),
        "ratings": len(every),
        "turns": {name: _mean(values) for name, values in by_turn.items()},
        "categories": {name: _mean(values) for name, values in by_category.items()},
    }


class LongWriteRubric(Rubric):
    """Marks a text in six dimensions."""

    def questions(self, example: Example, texts: Sequence[str]) -> list[JudgeQuestion]:
        """One question for the whole text."""
        _, template = self.prompts.texts["judge"]
        filled = template.replace("$INST$", str(example.fields["prompt"])).replace("$RESPONSE$", texts[0])
        return [JudgeQuestion("text", ({"role": "user", "content": filled},))]

    def parse(self, reply: str) -> Json | None:
        """The six marks of a reply that is JSON, alone or in a fence.

        As in the official reader, line breaks are removed before JSON is read, and text around JSON without a
        fence makes it unreadable. Note: marks outside of 1 to 5 make a reply unreadable too.
        """
        values = _json_of(reply)
        try:
            return {name: _mark(values[name]) for name in DIMENSIONS}
        except (ValueError, KeyError, TypeError):
            return None

    def tries_of(self, reply: str) -> int:
        """Two where a dimension is missing from JSON that can be read, else one.

        The official loop counts the missing dimension, and once more the error that looking for the next one
        then raises; so only the last dimension missing alone counts once.
        """
        values = _json_of(reply)
        if not isinstance(values, dict | list | str):
            return 1
        return 2 if any(name not in values for name in DIMENSIONS[:-1]) else 1

    def score(self, example: Example, texts: Sequence[str], marks: Sequence[Json | None]) -> float | None:
        """The mean of quality and length score, as a share of 100."""
        mark = marks[0]
        if mark is None:
            return None
        return (quality([mark]) + length_score(required(example), count_words(texts[0]))) / 200


def required(example: Example) -> int:
    """The number of words that an example asks for."""
    return int(example.fields["length"])


def count_words(text: str) -> int:
    """The number of Chinese characters and of words of Latin letters."""
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


def long_write_figures(
    marks: Sequence[Mapping[str, float] | None], lengths: Sequence[tuple[int, int]]
) -> Json:
    """The figures of LongBench-Write; those of quality are over the marked texts, None if there is none.

    The raw means and their plain mean are what SpeContext's table 4 has.

    Args:
        marks: the marks of each text.
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


def without_thoughts(reply: str) -> str:
    """A reply without the thinking that some servers leave in front of it.

    Nothing is left of a reply whose thinking was cut off: numbers in it are no verdict.
    """
    rest = _THOUGHTS.sub("", reply, count=1)
    return "" if rest.lstrip().startswith("<think>") else rest


def _json_of(reply: str) -> Any:
    """The JSON value of a reply; None where it cannot be read."""
    text = without_thoughts(reply)
    if "```json" in text:
        found = _FENCE.search(text)
        text = found.group(1) if found else ""
    try:
        return json.loads(text.replace("\n", ""))
    except (ValueError, RecursionError):
        return None


def _mark(value: object) -> float:
    """A mark as a number; digits in quotes count, as in the official reader."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is no mark")
    mark = float(value)
    if not math.isfinite(mark) or not LOWEST_MARK <= mark <= HIGHEST_MARK:
        raise ValueError(f"{mark} is no mark from {LOWEST_MARK} to {HIGHEST_MARK}")
    return mark


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
