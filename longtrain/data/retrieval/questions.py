"""Prompts that end with one retrieval question, used to train and to evaluate KV eviction.

Shapes: T tokens of one part of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from longtrain.data.retrieval.material import DocumentBuilder, Ids, Role
from longtrain.data.retrieval.phrases import MARGIN, Phrases
from longtrain.data.retrieval.wording import TaskWords
from longtrain.errors import ConfigError

QUESTION_TASKS = ("needles", "chains", "table", "quote")
MOST_KEYS, MOST_VALUES, MOST_CHAINS, MOST_LINES = 16, 4, 6, 96
LEAST_NAMES, MOST_NAMES = 2, 4
NEEDLE_DIGITS, TABLE_DIGITS, CHAIN_DIGITS = 7, 7, 5
CUE = 12
"""Tokens of the cue that asks for a quotation, and smallest length of the quoted passage."""


@dataclass(frozen=True)
class RetrievalQuestion:
    """A prompt in two parts (context and question), and its answer.

    Args:
        task: one of `QUESTION_TASKS`.
        context_T: start of the chat and the text, up to the question.
        question_T: the question, the start of the assistant's turn, and the first words of the answer
            (RULER's answer prefix), which targets would otherwise phrase in different ways.
        answer_T: the expected rest of the answer with its end marker.
        answer: that rest as text, without the marker.
        values: values that a correct answer must contain: the numbers or names asked for, in the order of
            the text, or the quoted passage. The question does not state a quotation's length.
    """

    task: str
    context_T: Ids
    question_T: Ids
    answer_T: Ids
    answer: str
    values: tuple[str, ...]


class RetrievalQuestionWriter(Phrases):
    """Writes prompts that end with one question about a fact hidden in their text; arguments: `Phrases`."""

    def question(self, task: str, n_tokens: int, rng: np.random.Generator) -> RetrievalQuestion:
        """Return a question whose prompt (`context_T` and `question_T`) has exactly `n_tokens` tokens.

        Args:
            task: `needles` (1 to 16 keys of 1 to 4 values each, as many as fit), `chains`, `table`, `quote`.
            n_tokens: prompt length, at least `least_tokens(task)`, turn marks included.
            rng: source of all randomness.

        Raises:
            ConfigError: `n_tokens` is too small for the task.
        """
        if n_tokens < self.least_tokens(task):
            raise ConfigError(
                f"a prompt of {n_tokens} tokens is too short for a question of the task '{task}'; allowed "
                f"with this target's tokenizer: {self.least_tokens(task)} or more"
            )
        return getattr(self, f"_write_{task}")(n_tokens, rng)

    def least_tokens(self, task: str) -> int:
        """Return the shortest prompt length that fits every question of a task, in tokens."""
        return int(getattr(self, f"_least_tokens_{task}")())

    def _least_tokens_needles(self) -> int:
        pools = (self.keys_listed, self.keys_made_up)
        key = max((np.concatenate([max(part, key=len) for part in pool]) for pool in pools), key=len)
        value = np.zeros(self._most_digits(NEEDLE_DIGITS), dtype=np.int32)
        fixed = max(self._fixed(self.wording.hidden(single=single), key=key) for single in (False, True))
        return fixed + MARGIN + most_tokens(self._needle_runs([key], [[value]]))

    def _least_tokens_chains(self) -> int:
        value = np.zeros(self._most_digits(CHAIN_DIGITS), dtype=np.int32)
        name = np.zeros(len("NAMES") + 2, dtype=np.int32)  # one token a letter, the space, and a prefix token
        fixed = self._fixed(self.wording.chains, value=value, count=self.phrase("2"))
        return fixed + MARGIN + most_tokens(self._chain_runs([name] * LEAST_NAMES, value))

    def _least_tokens_table(self) -> int:
        number = np.zeros(self._most_digits(TABLE_DIGITS), dtype=np.int32)
        line = 2 * len(number) + len(self.phrase(": ")) + len(self.phrase("\n"))
        return self._fixed(self.wording.table, key=number) + line

    def _least_tokens_quote(self) -> int:
        cue = np.zeros(CUE, dtype=np.int32)
        return self._fixed(self.wording.quote, cue=cue) + 2 * CUE  # cue in the text, passage

    def _most_digits(self, width: int) -> int:
        """Return the largest number of tokens of a number: its digits, and possibly a word prefix."""
        return width if self.digits is not None else width + 1

    def _chain_runs(self, ids: list[Ids], value: Ids) -> list[tuple[Ids, Ids]]:
        """Return a chain's sentences, `VAR A = value.` then `VAR B = VAR A.`, in the forms of `_hidden`."""
        lines = [self._hidden("VAR", [ids[0], self.phrase(" = "), value, self.phrase(".")])]
        for a, b in pairwise(ids):
            lines.append(self._hidden("VAR", [b, self.phrase(" = VAR"), a, self.phrase(".")]))
        return lines

    def _asked(self, words: TaskWords, **parts: Ids) -> Ids:
        """Return the question, the start of the assistant's turn, and the first words of its answer."""
        return np.concatenate(
            [self.fill(words.ask, **parts), self.assistant, self.fill(words.answer, **parts)]
        )

    def _write_needles(self, n_tokens: int, rng: np.random.Generator) -> RetrievalQuestion:
        n_keys = int(rng.integers(1, MOST_KEYS + 1))
        several = rng.random() < 0.5
        counts = rng.integers(1, MOST_VALUES + 1, n_keys) if several else np.ones(n_keys, dtype=int)
        made_up = rng.random() < 0.3
        first, second = self.words_made_up if made_up else self.words_listed
        picked = rng.choice(len(first) * len(second), n_keys, replace=False).tolist()
        keys = [
            np.concatenate(
                [self.phrase(f" {first[p // len(second)]}"), self.phrase(f"-{second[p % len(second)]}")]
            )
            for p in picked
        ]
        owner = rng.permutation(np.repeat(np.arange(n_keys), counts))
        numbers = self._draw(NEEDLE_DIGITS, len(owner), rng)
        spelt = self._spell(numbers, NEEDLE_DIGITS)
        runs = [self._needle_runs([keys[o]], [[v]])[0] for o, v in zip(owner, spelt, strict=True)]
        asked = int(owner[0])  # the first needle is always used, even if no other fits
        single = int(counts[asked]) == 1 and rng.random() < self.wording.singular
        room = n_tokens - self._fixed(self.wording.hidden(single=single), key=keys[asked]) - MARGIN
        sizes = np.cumsum([max(len(spaced), len(line)) for spaced, line in runs])
        kept = rng.permutation(max(1, int(np.searchsorted(sizes, room, side="right"))))
        found = [int(i) for i in kept if owner[i] == asked]
        hidden = [runs[i] for i in kept.tolist()]
        if len(found) == 1 and self.wording.singular == 1:
            single = True  # the key's other values did not fit
        words = self.wording.hidden(single=single)
        parts = self._prompt(words, hidden, self._asked(words, key=keys[asked]), n_tokens, rng)
        return self._with_values("needles", parts, tuple(str(numbers[i]) for i in found))

    def _write_chains(self, n_tokens: int, rng: np.random.Generator) -> RetrievalQuestion:
        numbers = self._draw(CHAIN_DIGITS, int(rng.integers(1, MOST_CHAINS + 1)), rng)
        spelt = self._spell(numbers, CHAIN_DIGITS)
        words, first = self.wording.chains, spelt[0]
        room = n_tokens - self._fixed(words, value=first, count=self.phrase("2")) - MARGIN
        chains: list[tuple[list[str], list[tuple[Ids, Ids]]]] = []
        for value in spelt:
            names = [self._letters(rng) for _ in range(int(rng.integers(LEAST_NAMES, MOST_NAMES + 1)))]
            lines = self._chain_runs([self._word(name) for name in names], value)
            while not chains and most_tokens(lines) > room and len(lines) > LEAST_NAMES:
                lines.pop()  # shorten the chain that is asked for until it fits
            if chains and most_tokens(lines) > room:
                break
            room -= most_tokens(lines)
            chains.append((names[: len(lines)], lines))
        order = rng.permutation(np.repeat(np.arange(len(chains)), [len(lines) for _, lines in chains]))
        left = [iter(lines) for _, lines in chains]
        hidden = [next(left[i]) for i in order.tolist()]
        found = tuple(chains[0][0])
        ask = self._asked(words, value=first, count=self.phrase(str(len(found))))
        parts = self._prompt(words, hidden, ask, n_tokens, rng)
        return self._with_values("chains", parts, found)

    def _write_table(self, n_tokens: int, rng: np.random.Generator) -> RetrievalQuestion:
        width = TABLE_DIGITS
        words, sep, newline = self.wording.table, self.phrase(": "), self.phrase("\n")
        digits = max(len(number) for number in self._numbers(width, 1, rng))
        line = 2 * digits + len(sep) + len(newline)
        fixed = self._fixed(words, key=np.zeros(digits, dtype=np.int32))
        share = int((n_tokens - fixed) * rng.uniform(0.2, 0.7))
        n_lines = max(1, min(share // line, MOST_LINES))
        keys, numbers = self._draw(width, n_lines, rng), self._draw(width, n_lines, rng)
        values = self._spell(numbers, width)
        body = DocumentBuilder()
        body.add(Role.PROMPT, self.phrase(words.intro))
        spelt = self._spell(keys, width)
        for key, value in zip(spelt, values, strict=True):
            body.add(Role.PROMPT, key, sep, value, newline)
        at = int(rng.integers(n_lines))
        question_T = self._asked(words, key=spelt[at])
        n_context = n_tokens - len(question_T) - len(self.start)
        context = self._filled(body, n_context, rng)
        context_T = np.concatenate([self.start, *context.runs])
        return self._with_values("table", (context_T, question_T), (str(numbers[at]),))

    def _write_quote(self, n_tokens: int, rng: np.random.Generator) -> RetrievalQuestion:
        length = int(rng.integers(24, 65))
        words = self.wording.quote
        room = n_tokens - self._fixed(words, cue=np.zeros(CUE, dtype=np.int32))
        length = min(length, room // 2)
        stream = self._stream(rng)
        text, breaks = self._text(stream, room, rng)
        last = room - CUE - length
        starts = breaks[breaks <= last] if (breaks <= last).any() else np.arange(last + 1)
        at = int(rng.choice(starts))
        passage = text[at + CUE : at + CUE + length]
        context_T = np.concatenate([self.start, self.user, self.phrase(words.intro), text])
        question_T = self._asked(words, cue=text[at : at + CUE])
        said = stream.text(passage)
        return RetrievalQuestion(
            "quote", context_T, question_T, np.concatenate([passage, self.end]), said, (said,)
        )

    def _fixed(self, words: TaskWords, **parts: Ids) -> int:
        """Return the number of tokens of a prompt that are not running text."""
        opening = len(self.start) + len(self.user) + len(self.phrase(words.intro))
        return opening + len(self._asked(words, **parts))

    def _with_values(self, task: str, parts: tuple[Ids, Ids], values: tuple[str, ...]) -> RetrievalQuestion:
        """Return the question whose answer consists of the values, one after the other."""
        text = f" {', '.join(values)}."
        answer_T = np.concatenate([np.array(self.encode(text), dtype=np.int32), self.end])
        return RetrievalQuestion(task, *parts, answer_T, text, values)

    def _prompt(
        self,
        words: TaskWords,
        hidden: list[tuple[Ids, Ids]],
        question_T: Ids,
        n_tokens: int,
        rng: np.random.Generator,
    ) -> tuple[Ids, Ids]:
        """Return context with sentences hidden in order, and the question, of `n_tokens` together."""
        doc = DocumentBuilder()
        n_context = n_tokens - len(question_T) - len(self.start)
        self._context(doc, words.intro, hidden, n_context, rng, in_order=True)
        return np.concatenate([self.start, *doc.runs]), question_T


def most_tokens(runs: list[tuple[Ids, Ids]]) -> int:
    """Return the largest number of tokens of sentences, by the longer of their two forms."""
    return sum(max(len(spaced), len(line)) for spaced, line in runs)
