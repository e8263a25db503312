"""Word counting: the common words of a numbered list, and the most frequent words of a coded text."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from string import ascii_lowercase

from longtrain.evaluation.ruler.tasks import SHORT, Draft, Task
from longtrain.evaluation.ruler.vocabulary import Vocabulary

STEP = 10
CODED_LETTERS = 6
TOKENS_A_CODED_WORD = 50
"""One coded word of the vocabulary for so many tokens."""

DOTS = "..."
"""The most frequent coded word: to be ignored."""


class CommonWordsWriter:
    """Writes `cwe`, after one solved example. Sizes are different words of the list.

    Args:
        task: the task of the family `common_words_extraction`.
        length: the stated length, tokens.
        seed: of the run; it orders the lists, alike in every example.
        vocabulary: where words come from.
    """

    unit = 1
    step = STEP

    def __init__(self, task: Task, length: int, *, seed: int, vocabulary: Vocabulary) -> None:
        repeats = (int(task.options["common_repeats"]), int(task.options["other_repeats"]))
        self.common = int(task.options["common"])
        self.repeats = (6, 1) if length < SHORT else repeats
        self.solved_size, self.solved_repeats = (20, (3, 1)) if length < SHORT else (40, (10, 3))
        self.seed, self.vocabulary = seed, vocabulary
        self.template, self.prefix = task.wording.template, task.wording.answer_prefix

    def least(self, index: int) -> int:
        """The common words alone."""
        return self.common

    def write(self, size: int, index: int, stream: str) -> Draft:
        """See `Writer`."""
        rng = Random(stream)
        solved, solved_answers = self._list(self.solved_size, self.solved_repeats, rng)
        context, answers = self._list(size, self.repeats, rng)
        shown = f"{self.template.format(context=solved)}{self.prefix} {_numbered(solved_answers)}"
        return Draft(f"{shown}\n{self.template.format(context=context)}", self.prefix, tuple(answers))

    def _list(self, size: int, repeats: tuple[int, int], rng: Random) -> tuple[str, list[str]]:
        chosen = rng.sample(self.vocabulary.words(size), size)
        common, others = chosen[: self.common], chosen[self.common :]
        words = common * repeats[0] + others * repeats[1]
        Random(self.seed).shuffle(words)
        return _numbered(words), common


class CodedWordsWriter:
    """Writes `fwe`. Sizes are words of a Zeta distribution's text, cut to whole counts.

    Args:
        task: the task of the family `freq_words_extraction`.
        seed: of the run; it orders vocabulary and text, alike in every example.
        room: tokens for the prompt without frame and answer.
    """

    def __init__(self, task: Task, *, seed: int, room: int) -> None:
        self.seed = seed
        self.coded_words = max(room // TOKENS_A_CODED_WORD, 4)
        alpha = float(task.options["alpha"])
        self.shares = [rank**-alpha / _zeta(alpha) for rank in range(1, self.coded_words + 1)]
        self.unit = self.step = max(room // 32, 1)
        self._least = self._aligned(max(room, 0) // CODED_LETTERS)
        self.template, self.prefix = task.wording.template, task.wording.answer_prefix

    def least(self, index: int) -> int:
        """The smallest size on the official grid from which on the third place is never shared."""
        return self._least

    def write(self, size: int, index: int, stream: str) -> Draft:
        """See `Writer`."""
        rng = Random(stream)
        found: set[str] = set()
        while len(found) < self.coded_words:
            found.add("".join(rng.choices(ascii_lowercase, k=CODED_LETTERS)))
        coded = sorted(found)
        Random(self.seed).shuffle(coded)
        coded[0] = DOTS
        counts = self._counts(size)
        words = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        Random(self.seed).shuffle(words)
        return Draft(self.template.format(context=" ".join(words)), self.prefix, tuple(coded[1:4]))

    def _counts(self, size: int) -> list[int]:
        return [int(size * share) for share in self.shares]

    def _aligned(self, first: int) -> int:
        fourth, fifth = self.shares[3], (*self.shares, 0.0)[4]
        safe = next(
            n for n in range(int(1 / (fourth - fifth)) + 1, 0, -1) if not _apart(n - 1, fourth, fifth)
        )
        return first - (first - safe) // self.unit * self.unit


def _apart(size: int, more: float, less: float) -> bool:
    """Whether two words of these shares come out with different counts."""
    return int(size * more) > int(size * less)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


def _zeta(alpha: float, terms: int = 1000) -> float:
    """Riemann's zeta for alpha > 1: a sum and Euler and Maclaurin's rest, exact to fp64 here."""
    rest = terms ** (1 - alpha) / (alpha - 1) - 0.5 * terms**-alpha + alpha / 12 * terms ** (-alpha - 1)
    return sum(k**-alpha for k in range(terms, 0, -1)) + rest
