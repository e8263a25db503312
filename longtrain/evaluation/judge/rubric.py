"""What a benchmark asks its judge about an answer, and what it reads from the replies."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtrain.evaluation.judge.prompts import Prompts
    from longtrain.evaluation.task import Example

Json = dict[str, Any]

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """One question to the judge.

    Args:
        about: what is judged, e.g. `turn 1`.
        messages: the conversation that is sent.
    """

    about: str
    messages: tuple[Mapping[str, str], ...]

    @property
    def key(self) -> str:
        """Of its text: equal answers of two systems are one question, asked once."""
        content = json.dumps([dict(message) for message in self.messages], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


class Rubric(ABC):
    """The judging side of a benchmark.

    Args:
        prompts: what the judge is told.
    """

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts

    def settings(self) -> Json:
        """JSON values that marks follow from, beside the judge itself."""
        return {"prompts_sha256": self.prompts.sha256}

    @abstractmethod
    def questions(self, example: Example, texts: Sequence[str]) -> list[Question]:
        """What to ask about the answers to an example, one text a turn."""

    @abstractmethod
    def parse(self, reply: str) -> Json | None:
        """The mark in a judge's reply; None where there is none."""

    @abstractmethod
    def score(self, example: Example, texts: Sequence[str], marks: Sequence[Json | None]) -> float | None:
        """An example's score, 0 to 1, from the marks of its questions; None if it cannot be said."""


def conversation(system: str, user: str) -> tuple[Mapping[str, str], ...]:
    """Messages of a system prompt, left out if empty, and a user's text."""
    start = ({"role": "system", "content": system},) if system else ()
    return (*start, {"role": "user", "content": user})


def without_thoughts(reply: str) -> str:
    """A reply without the thinking that some servers leave in front of it.

    Nothing is left of a reply whose thinking was cut off: numbers in it are no verdict.
    """
    rest = _THOUGHTS.sub("", reply, count=1)
    return "" if rest.lstrip().startswith("<think>") else rest
