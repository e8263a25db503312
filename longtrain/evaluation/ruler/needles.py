"""Needles in a haystack: magic numbers or uuids under keys, in noise, in essays or among other needles."""

from __future__ import annotations

import uuid
from random import Random

import numpy as np

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.ruler.haystack import NOISE, Haystack
from longtrain.evaluation.ruler.tasks import SHORT, Draft, Task
from longtrain.evaluation.ruler.vocabulary import Vocabulary

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, num=40, endpoint=True))]
"""Places in an essay where needles can stand, percent."""

STEPS = {"essay": 500, "noise": 25, "needle": 25}
SHORT_STEP = 5
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"))
"""What becomes of the template where one value is asked for, in order."""


class NeedleWriter:
    """Writes the eight needle tasks. Sizes are words of an essay, or lines.

    Keys of one prompt differ from each other, distractors' too, so that a question has one answer (the
    official generator leaves that to chance).

    Args:
        task: a task of the family `niah`.
        length: the stated length, tokens.
        seed: of the run; it orders the needles, alike in every example.
        haystack: the text of essay haystacks.
        vocabulary: where keys come from.
    """

    unit = 1

    def __init__(
        self, task: Task, length: int, *, seed: int, haystack: Haystack, vocabulary: Vocabulary
    ) -> None:
        self.kind = str(task.options["haystack"])
        self.key, self.value = str(task.options["key"]), str(task.options["value"])
        self.values, self.queries = int(task.options["values"]), int(task.options["queries"])
        self.keys = max(int(task.options["keys"]), self.queries)
        self.step = SHORT_STEP if self.kind != "essay" and length < SHORT else STEPS[self.kind]
        self.seed, self.haystack, self.vocabulary = seed, haystack, vocabulary
        self.template, self.prefix = task.wording.template, task.wording.answer_prefix

    def least(self, index: int) -> int:
        """A word of an essay, or as many lines as there are needles."""
        return 1 if self.kind == "essay" else self.keys * self.values

    def write(self, size: int, index: int, stream: str) -> Draft:
        """See `Writer`."""
        rng = Random(stream)
        seen: set[str] = set()
        keys = [self._key(rng, seen) for _ in range(self.keys)]
        values = [self._values(rng) for _ in keys]
        needles = [self._needle(key, value) for key, row in zip(keys, values, strict=True) for value in row]
        Random(self.seed).shuffle(needles)
        hide = self._essay if self.kind == "essay" else self._lines
        context = hide(needles, size, rng, seen)
        asked = rng.sample(range(self.keys), self.queries)
        names = [keys[i] for i in asked]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
        template, prefix, what = self.template, self.prefix, self.value
        if self.queries * self.values == 1:
            what = what.removesuffix("s")
            for old, new in SINGULAR:
                template, prefix = template.replace(old, new), prefix.replace(old, new)
        return Draft(
            template.format(type_needle_v=what, context=context, query=query),
            prefix.format(type_needle_v=what, query=query),
            tuple(value for i in asked for value in values[i]),
        )

    def _essay(self, needles: list[str], size: int, rng: Random, seen: set[str]) -> str:
        sentences = self.haystack.sentences(size)
        depths = rng.sample(DEPTHS, len(needles))
        places = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
        parts = []
        for i, needle in enumerate([*needles, None]):
            parts.append(" ".join(sentences[places[i] : places[i + 1]]))
            if needle is not None:
                parts.append(needle)
        return " ".join(parts)

    def _lines(self, needles: list[str], size: int, rng: Random, seen: set[str]) -> str:
        if self.kind == "noise":
            lines = [NOISE] * size
        else:
            lines = [self._needle(self._key(rng, seen), draw(self.value, rng)) for _ in range(size)]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self.value, key=key, value=value)

    def _key(self, rng: Random, seen: set[str]) -> str:
        """A key that no needle of this prompt has yet."""
        adjectives, nouns = self.vocabulary.adjectives, self.vocabulary.nouns
        if self.key == "words" and 2 * len(seen) >= len(adjectives) * len(nouns):
            raise DataError(
                f"a prompt needs more than {len(seen)} different keys, and the word lists "
                f"'{self.vocabulary.name}' make {len(adjectives) * len(nouns)}; use words=wonderwords, or a "
                "shorter length"
            )
        while True:
            if self.key == "words":
                key = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
            else:
                key = draw(self.key, rng)
            if key not in seen:
                seen.add(key)
                return key

    def _values(self, rng: Random) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < self.values:
            found[draw(self.value, rng)] = None
        return list(found)


def draw(kind: str, rng: Random) -> str:
    """A random seven-digit number or version 4 uuid.

    Raises:
        ConfigError: another kind.
    """
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    raise ConfigError(f"needles of kind '{kind}'; allowed: numbers, uuids (keys also words)")
