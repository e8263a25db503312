"""Writes RULER's prompts: needles, variable chains, word lists and questions over documents."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.ruler.questions import DATASETS, RulerQuestion
from longtrain.evaluation.ruler.sizing import SHORT_STEP, STEP, Material, PromptText, PromptWriter, largest
from longtrain.evaluation.ruler.tasks import DOCUMENT, NEEDLE, NOISE

DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, num=40, endpoint=True))]
"""Depths of an essay, in percent, at which needles can be inserted."""

NEEDLE_STEPS = {"essay": 500, "noise": 25, "needle": 25}
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"))
"""Replacements in the template if one value is asked for, in order."""


class NeedleWriter(PromptWriter):
    """Writes the eight needle tasks. The size is in words of an essay, or in lines.

    All keys of one prompt differ, including those of distractors, so that a question has one answer (the
    official generator leaves that to chance).
    """

    def __init__(self, of: Material) -> None:
        super().__init__(of)
        self.kind, self.key, self.value = (str(self.options[name]) for name in ("haystack", "key", "value"))
        self.values, self.queries = int(self.options["values"]), int(self.options["queries"])
        self.keys = max(int(self.options["keys"]), self.queries)
        self.step = SHORT_STEP if self.kind != "essay" and self.short else NEEDLE_STEPS[self.kind]

    def least(self, index: int) -> int:
        """One word of an essay, or as many lines as there are needles."""
        return 1 if self.kind == "essay" else self.keys * self.values

    def write(self, size: int, index: int, stream: str) -> PromptText:
        """See `PromptWriter`."""
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
        return PromptText(
            template.format(type_needle_v=what, context=context, query=query),
            prefix.format(type_needle_v=what, query=query),
            tuple(value for i in asked for value in values[i]),
        )

    def _essay(self, needles: list[str], size: int, rng: Random, seen: set[str]) -> str:
        sentences = self.of.haystack.sentences(size)
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
        """Draw a key that no needle of this prompt has yet."""
        adjectives, nouns = self.of.words.adjectives, self.of.words.nouns
        if self.key == "words" and 2 * len(seen) >= len(adjectives) * len(nouns):
            raise DataError(
                f"a prompt needs more than {len(seen)} different keys, and the word lists "
                f"'{self.of.words.name}' make {len(adjectives) * len(nouns)}; use words=wonderwords, or a "
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
    """Draw a random seven-digit number, or of the kind `uuids` a version 4 uuid."""
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


NAME_LETTERS = 5
SOLVED_NAME_LETTERS = 3
SOLVED_TOKENS = 500
"""Maximum tokens of the solved example without its answer."""


class VariableWriter(PromptWriter):
    """Writes the task `vt` (variable tracking). The size is in lines of noise.

    The solved example's lines are the same in every prompt of a run; its names and value are drawn for each
    prompt.
    """

    def __init__(self, of: Material) -> None:
        super().__init__(of)
        self.chains, self.hops = int(self.options["chains"]), int(self.options["hops"])
        self.step = SHORT_STEP if self.short else STEP
        self._solved_stream = of.stream("solved example")
        least = max(SHORT_STEP, self.least(0))
        fits = largest(lambda lines: of.framing.count_text(self._example(lines)), SOLVED_TOKENS, least=least)
        self._solved_lines = fits or least

    def least(self, index: int) -> int:
        """As many lines as a chain has assignments."""
        return self.hops + 1

    def write(self, size: int, index: int, stream: str) -> PromptText:
        """See `PromptWriter`."""
        rng = Random(stream)
        chains = self._names(rng, NAME_LETTERS)
        values = [_value(rng) for _ in chains]
        context = self._context(chains, values, size, rng)
        solved_chains = self._names(rng, SOLVED_NAME_LETTERS)
        solved_values = self._fresh_values(rng, set(values))
        solved = self._solved(solved_chains, solved_values, self._solved_lines)
        shown = " ".join(solved_chains[0])
        return PromptText(
            f"{solved} {shown}\n\n" + self.template.format(context=context, query=values[0]),
            self._answer_prefix(values[0]),
            tuple(chains[0]),
        )

    def _solved(self, chains: list[list[str]], values: list[str], lines: int) -> str:
        context = self._context(chains, values, lines, Random(self._solved_stream))
        return self.template.format(context=context, query=values[0]) + self._answer_prefix(values[0])

    def _example(self, lines: int) -> str:
        """A solved example, for counting its tokens."""
        rng = Random(self._solved_stream)
        return self._solved(self._names(rng, SOLVED_NAME_LETTERS), self._fresh_values(rng, set()), lines)

    def _answer_prefix(self, value: str) -> str:
        return self.prefix.format(num_v=self.hops + 1, query=value)

    def _context(self, chains: list[list[str]], values: list[str], size: int, rng: Random) -> str:
        """Noise lines with each chain's assignments inserted in order."""
        lines = [NOISE] * size
        for names, value in zip(chains, values, strict=True):
            chain = [f"VAR {names[0]} = {value}"]
            chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
            places = sorted(rng.sample(range(len(lines)), len(chain)))
            for shift, (place, statement) in enumerate(zip(places, chain, strict=True)):
                lines.insert(place + shift, statement)
        return "\n".join(lines).replace(". \n", ".\n")

    def _names(self, rng: Random, letters: int) -> list[list[str]]:
        """Distinct names for every chain; none is `VAR`."""
        wanted = (self.hops + 1) * self.chains
        found: dict[str, None] = {}
        while len(found) < wanted:
            name = "".join(rng.choices(ascii_uppercase, k=letters))
            if name != "VAR":
                found[name] = None
        names = list(found)
        return [names[i : i + self.hops + 1] for i in range(0, wanted, self.hops + 1)]

    def _fresh_values(self, rng: Random, taken: set[str]) -> list[str]:
        values: list[str] = []
        while len(values) < self.chains:
            if (value := _value(rng)) not in taken:
                values.append(value)
        return values


def _value(rng: Random) -> str:
    return str(rng.randrange(10000, 99999))


CODED_LETTERS = 6
TOKENS_A_CODED_WORD = 50
"""The vocabulary has one coded word for this many tokens."""

DOTS = "..."
"""The most frequent coded word, which the answer must ignore."""


class CommonWordsWriter(PromptWriter):
    """Writes the task `cwe` (common words), after one solved example. The size is in distinct words of the
    list.

    The solved example is in a chat turn of its own, as in the official run.
    """

    def __init__(self, of: Material) -> None:
        super().__init__(of)
        repeats = (int(self.options["common_repeats"]), int(self.options["other_repeats"]))
        self.common = int(self.options["common"])
        self.repeats = (6, 1) if self.short else repeats
        self.solved_size, self.solved_repeats = (20, (3, 1)) if self.short else (40, (10, 3))

    def least(self, index: int) -> int:
        """The number of common words."""
        return self.common

    def write(self, size: int, index: int, stream: str) -> PromptText:
        """See `PromptWriter`."""
        rng = Random(stream)
        solved, solved_answers = self._list(self.solved_size, self.solved_repeats, rng)
        context, answers = self._list(size, self.repeats, rng)
        shown = self.of.framing.text(self.template.format(context=solved), self.prefix)
        return PromptText(
            self.template.format(context=context),
            self.prefix,
            tuple(answers),
            solved=f"{shown} {_numbered(solved_answers)}\n",
        )

    def _list(self, size: int, repeats: tuple[int, int], rng: Random) -> tuple[str, list[str]]:
        chosen = rng.sample(self.of.words.words(size), size)
        common, others = chosen[: self.common], chosen[self.common :]
        words = common * repeats[0] + others * repeats[1]
        Random(self.seed).shuffle(words)
        return _numbered(words), common


class CodedWordsWriter(PromptWriter):
    """Writes the task `fwe` (frequent coded words). The size is in words sampled from a Zeta distribution, in
    whole counts.
    """

    def __init__(self, of: Material) -> None:
        super().__init__(of)
        room = of.room - of.framing.tokens
        self.coded_words = max(room // TOKENS_A_CODED_WORD, 4)
        alpha = float(self.options["alpha"])
        self.shares = [rank**-alpha / _zeta(alpha) for rank in range(1, self.coded_words + 1)]
        self.unit = self.step = max(room // 32, 1)
        self._least = self._aligned(max(room, 0) // CODED_LETTERS)

    def least(self, index: int) -> int:
        """The smallest size on the official grid from which on the third-most frequent word is unique."""
        return self._least

    def write(self, size: int, index: int, stream: str) -> PromptText:
        """See `PromptWriter`."""
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
        return PromptText(self.template.format(context=" ".join(words)), self.prefix, tuple(coded[1:4]))

    def _counts(self, size: int) -> list[int]:
        return [int(size * share) for share in self.shares]

    def _aligned(self, first: int) -> int:
        fourth, fifth = self.shares[3], (*self.shares, 0.0)[4]
        safe = next(
            n for n in range(int(1 / (fourth - fifth)) + 1, 0, -1) if not _apart(n - 1, fourth, fifth)
        )
        return first - (first - safe) // self.unit * self.unit


class DocumentWriter(PromptWriter):
    """Writes the tasks `qa_1` and `qa_2`. The size is in documents; example i asks question i.

    Note: HotpotQA's yes-or-no questions are included, as in the official data.

    Raises:
        ConfigError: no questions were given.
    """

    def __init__(self, of: Material) -> None:
        super().__init__(of)
        if of.questions is None:
            name = str(self.options["dataset"])
            raise ConfigError(
                f"RULER task {of.task.name} needs the questions of {name}; pass suite.{name}=FILE, to be had "
                f"from {DATASETS[name].url}"
            )
        self.questions = of.questions

    def least(self, index: int) -> int:
        """The number of the question's own documents."""
        return len(self._question(index).own)

    def write(self, size: int, index: int, stream: str) -> PromptText:
        """See `PromptWriter`."""
        rng = Random(stream)
        question, documents = self._question(index), self.questions.documents
        chosen = self._choose(question, size, rng)
        Random(self.seed).shuffle(chosen)
        context = "\n\n".join(
            DOCUMENT.format(i=place, document=documents[which]) for place, which in enumerate(chosen, 1)
        )
        return PromptText(
            self.template.format(context=context, query=question.query), self.prefix, question.answers
        )

    def _choose(self, question: RulerQuestion, size: int, rng: Random) -> list[int]:
        """Choose documents: the question's own, then those of its article, then any; all are repeated if they
        run out.
        """
        own, near, total = list(question.own), list(question.near), len(self.questions.documents)
        if size >= total:
            return (list(range(total)) * -(-size // total))[:size]
        missing = size - len(own)
        if missing <= len(near):
            return own + rng.sample(near, missing)
        taken = {*own, *near}
        others = [i for i in range(total) if i not in taken]
        return own + near + rng.sample(others, missing - len(near))

    def _question(self, index: int) -> RulerQuestion:
        items = self.questions.items
        if index >= len(items):
            raise DataError(
                f"question {index} of {self.questions.name} was asked for, it has {len(items)}; take fewer "
                "examples"
            )
        return items[index]


WRITERS: dict[str, type[PromptWriter]] = {
    "niah": NeedleWriter,
    "variable_tracking": VariableWriter,
    "common_words_extraction": CommonWordsWriter,
    "freq_words_extraction": CodedWordsWriter,
    "qa": DocumentWriter,
}
"""Family of tasks -> the class that writes its prompts."""


def _apart(size: int, more: float, less: float) -> bool:
    """True if two words of these shares get different counts."""
    return int(size * more) > int(size * less)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


def _zeta(alpha: float) -> float:
    """Riemann's zeta for alpha > 1: a partial sum and the Euler-Maclaurin remainder, exact to fp64 here."""
    terms = 1000
    rest = terms ** (1 - alpha) / (alpha - 1) - 0.5 * terms**-alpha + alpha / 12 * terms ** (-alpha - 1)
    return sum(k**-alpha for k in range(terms, 0, -1)) + rest
