"""MT-Bench's judging: two ratings a question, with reference answers where they can be right or wrong.

Source: Zheng et al., 2306.05685; FastChat, fastchat/llm_judge: common.py, show_result.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from longtrain.errors import DataError
from longtrain.evaluation.judge.prompts import Prompts
from longtrain.evaluation.judge.rubric import Json, Question, Rubric, conversation, without_thoughts

if TYPE_CHECKING:
    from longtrain.evaluation.task import Example

NEED_REFERENCE = ("math", "reasoning", "coding")
"""Categories whose answers are judged against a reference answer."""

HIGHEST = 10.0

_RATING = re.compile(r"\[\[(\d+\.?\d*)\]\]", re.ASCII)
_SECOND_CHOICE = re.compile(r"\[(\d+\.?\d*)\]", re.ASCII)


class MtBench(Rubric):
    """Rates both turns of each question from 1 to 10.

    Args:
        prompts: the four prompts.
        references: question id -> reference answers of the two turns.
    """

    def __init__(self, prompts: Prompts, references: Mapping[str, Sequence[str]]) -> None:
        super().__init__(prompts)
        self.references = references

    def settings(self) -> Json:
        """With the hash of the reference answers."""
        content = json.dumps({name: list(texts) for name, texts in self.references.items()}, sort_keys=True)
        return {
            **super().settings(),
            "references_sha256": hashlib.sha256(content.encode()).hexdigest()[:16],
        }

    def questions(self, example: Example, texts: Sequence[str]) -> list[Question]:
        """The first turn alone, then the whole conversation with its second turn.

        Raises:
            DataError: the category needs a reference answer and there is none.
        """
        asked = [str(turn) for turn in example.fields["turns"]]
        answers = [text.strip() for text in texts]
        values = {f"question_{turn}": text for turn, text in enumerate(asked, 1)}
        values |= {f"answer_{turn}": text for turn, text in enumerate(answers, 1)}
        kind = "single-v1"
        if example.fields["category"] in NEED_REFERENCE:
            kind = "single-math-v1"
            values |= self._references(example)
        first = {**values, "question": asked[0], "answer": answers[0]}
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
        rating = float(found.group(1)) if found else HIGHEST + 1
        return {"rating": rating} if rating <= HIGHEST else None

    def score(self, example: Example, texts: Sequence[str], marks: Sequence[Json | None]) -> float | None:
        """The mean of the ratings there are, as a share of 10."""
        ratings = [float(mark["rating"]) for mark in marks if mark is not None]
        return sum(ratings) / len(ratings) / HIGHEST if ratings else None

    def _references(self, example: Example) -> dict[str, str]:
        texts = self.references.get(example.id)
        if texts is None:
            raise DataError(
                f"question {example.id} ({example.fields['category']}) is judged against a reference answer, "
                "and there is none; pass suite.references=FILE (FastChat's reference_answer/gpt-4.jsonl)"
            )
        return {f"ref_answer_{turn}": text for turn, text in enumerate(texts, 1)}

    def _question(self, about: str, name: str, values: Mapping[str, str]) -> Question:
        system, template = self.prompts.texts[name]
        return Question(about, conversation(system, template.format(**values)))


def figures(ratings: Sequence[tuple[str, Sequence[float | None]]]) -> Json:
    """The benchmark's figures, as FastChat prints them: means over all ratings there are.

    Args:
        ratings: category and the two turns' ratings, of each question.
    """
    by_turn: dict[str, list[float]] = {"turn 1": [], "turn 2": []}
    by_category: dict[str, list[float]] = {}
    for category, turns in ratings:
        for turn, rating in enumerate(turns, 1):
            if rating is not None:
                by_turn[f"turn {turn}"].append(rating)
                by_category.setdefault(category, []).append(rating)
    every = [rating for ratings_ in by_turn.values() for rating in ratings_]
    return {
        "score": _mean(every),
        "ratings": len(every),
        "turns": {name: _mean(values) for name, values in by_turn.items()},
        "categories": {name: _mean(values) for name, values in by_category.items()},
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
