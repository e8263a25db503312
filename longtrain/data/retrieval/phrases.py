"""Tokenised phrases of the retrieval tasks, and contexts with sentences hidden in them.

Shapes: T tokens of one document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import Formatter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from longtrain.data.retrieval.material import (
    ADJECTIVES,
    NOUNS,
    ChatIds,
    DocumentBuilder,
    Ids,
    Role,
    TextStream,
)
from longtrain.data.retrieval.wording import RULER, Wording
from longtrain.errors import ConfigError

Encode: TypeAlias = Callable[[str], Sequence[int]]

MARGIN = 32
"""Smallest number of tokens of text that sentences are hidden in."""


class Phrases:
    """Base class of the writers of retrieval tasks: makes sentences, keys, numbers and contexts.

    Args:
        encode: text -> ids, without special tokens.
        chat: the turn marks.
        streams: real text to insert sentences into, at least one.
        stream_weights: relative frequency of each stream; None: its number of tokens.
        separator: token between a stream's documents; replaced by a line end inside a chat.
        wording: the wording of questions.
    """

    def __init__(
        self,
        encode: Encode,
        chat: ChatIds,
        streams: Sequence[TextStream],
        *,
        stream_weights: Sequence[float] | None = None,
        separator: int = 0,
        wording: Wording = RULER,
    ) -> None:
        self.encode, self.streams, self.wording = encode, list(streams), wording
        self.start, self.user, self.assistant, self.end = (
            np.array(ids, dtype=np.int32) for ids in (chat.start, chat.user, chat.assistant, chat.end)
        )
        weights = np.array(stream_weights or [len(s.ids_T) for s in streams], dtype=float)
        self._edges = np.cumsum(weights / weights.sum())
        self._phrases: dict[str, Ids] = {}
        self.separator = separator
        digits = self.phrase("0123456789")
        self.digits = digits if len(set(digits.tolist())) == len(digits) == 10 else None
        cut = {
            part
            for w in ADJECTIVES + NOUNS
            for part in (w[: -(len(w) // 3)], w[len(w) // 3 :])
            if len(part) > 2
        }
        made_up = sorted(cut)
        self.words_listed, self.words_made_up = (ADJECTIVES, NOUNS), (tuple(made_up), tuple(made_up))
        self.keys_listed, self.keys_made_up = (
            ([self.phrase(f" {w}") for w in first], [self.phrase(f"-{w}") for w in second])
            for first, second in (self.words_listed, self.words_made_up)
        )

    def phrase(self, text: str) -> Ids:
        """Return the ids of a fixed text, tokenised once."""
        if text not in self._phrases:
            self._phrases[text] = np.array(self.encode(text), dtype=np.int32)
        return self._phrases[text]

    def fill(self, template: str, **parts: Ids) -> Ids:
        """Return the ids of a template: the text between its placeholders is tokenised piece by piece.

        Args:
            template: the text, with placeholders in braces.
            parts: token ids of each placeholder.
        """
        runs: list[Ids] = [np.zeros(0, dtype=np.int32)]
        for text, place, _, _ in Formatter().parse(template):
            runs += [self.phrase(text)] if text else []
            runs += [parts[place]] if place is not None else []
        return np.concatenate(runs)

    def _needle_runs(self, keys: list[Ids], values: list[list[Ids]]) -> list[tuple[Ids, Ids]]:
        tails = [
            [key, self.phrase(" is: "), v, self.phrase(".")]
            for key, vs in zip(keys, values, strict=True)
            for v in vs
        ]
        return [self._hidden("One of the special magic numbers for", tail) for tail in tails]

    def _later(self, ask: str, *, opening: bool) -> str:
        """Return a question's template without its leading line end, unless it is the document's first."""
        return ask if opening else ask.removeprefix("\n")

    def _answer(self, doc: DocumentBuilder, key: Ids, values: list[Ids], *, single: bool) -> None:
        begin = self.wording.hidden(single=single).answer + " "
        doc.add(Role.ANSWER, self.fill(begin, key=key))
        for i, value in enumerate(values):
            if i:
                doc.add(Role.ANSWER, self.phrase(", "))
            doc.add(Role.VALUE, value)
        doc.add(Role.ANSWER, self.phrase("."), self.end)

    def _keys(self, n: int, rng: np.random.Generator, words: tuple[list[Ids], list[Ids]]) -> list[Ids]:
        first, second = words
        picked = rng.choice(len(first) * len(second), n, replace=False)
        return [np.concatenate([first[p // len(second)], second[p % len(second)]]) for p in picked.tolist()]

    def _stream(self, rng: np.random.Generator) -> TextStream:
        return self.streams[min(int(np.searchsorted(self._edges, rng.random())), len(self.streams) - 1)]

    def _text(self, stream: TextStream, n: int, rng: np.random.Generator) -> tuple[Ids, NDArray[np.int64]]:
        """Return text for a chat, with a line end where a document ends."""
        text, breaks = stream.cut(n, rng)
        text[text == self.separator] = self.phrase("\n")[-1]
        return text, breaks

    def _name(self, rng: np.random.Generator) -> Ids:
        """Return a random variable name, tokenised as a word."""
        return self._word(self._letters(rng))

    def _letters(self, rng: np.random.Generator) -> str:
        """Return a random variable name of five capital letters."""
        return "".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 5))

    def _word(self, name: str) -> Ids:
        return np.array(self.encode(f" {name}"), dtype=np.int32)

    def _hidden(self, start: str, rest: list[Ids]) -> tuple[Ids, Ids]:
        """Return a sentence in two forms: inside a line (after a space), and as a line of its own."""
        return (
            np.concatenate([self.phrase(" " + start), *rest]),
            np.concatenate([self.phrase(start), *rest, self.phrase("\n")]),
        )

    def _ask(self, doc: DocumentBuilder, question: Ids, *, opening: bool) -> None:
        """Append a question; the opening one ends the user's turn that began with the context."""
        doc.add(Role.PROMPT, *([] if opening else [self.user]), question, self.assistant)

    def _context(
        self,
        doc: DocumentBuilder,
        intro: str,
        hidden: list[tuple[Ids, Ids]],
        n_tokens: int,
        rng: np.random.Generator,
        *,
        in_order: bool = False,
        at: tuple[int, float] | None = None,
    ) -> None:
        """Return the first turn's beginning, of `n_tokens`: intro, then text with sentences hidden at breaks.

        Sentence `at[0]` is put at the break nearest to the share `at[1]` of the text, the others at random.
        """
        doc.add(Role.PROMPT, self.user, self.phrase(intro))
        room = n_tokens - doc.n
        certain = room - sum(max(len(spaced), len(line)) for spaced, line in hidden)
        if certain < 0:
            raise ConfigError(
                f"{n_tokens} tokens are too few for {len(hidden)} hidden sentences; ask for fewer"
            )
        stream = self._stream(rng)
        text, breaks = self._text(stream, room, rng)
        breaks = breaks[breaks <= certain]
        places = np.sort(rng.choice(breaks, len(hidden))) if len(breaks) else np.full(len(hidden), certain)
        last = 0
        order = range(len(hidden)) if in_order else rng.permutation(len(hidden)).tolist()
        pairs = list(zip(places.tolist(), order, strict=True))
        if at is not None:
            wanted = at[1] * certain
            place = int(breaks[np.abs(breaks - wanted).argmin()]) if len(breaks) else int(wanted)
            pairs = sorted((place if which == at[0] else other, which) for other, which in pairs)
        for place, which in pairs:
            doc.add(Role.TEXT, text[last:place])
            doc.add(Role.PROMPT, hidden[which][0 if stream.spaced_V[text[place]] else 1])
            last = place
        doc.add(Role.TEXT, text[last : last + n_tokens - doc.n])

    def _filled(self, body: DocumentBuilder, n_tokens: int, rng: np.random.Generator) -> DocumentBuilder:
        """Return the body as a chat of exactly `n_tokens`, filled up with text before it."""
        doc = DocumentBuilder()
        doc.add(Role.PROMPT, self.user)
        newline = self.phrase("\n")
        n_text = n_tokens - body.n - len(self.user)
        if n_text > len(newline):
            doc.add(Role.TEXT, self._text(self._stream(rng), n_text - len(newline), rng)[0], newline)
        else:
            doc.add(Role.TEXT, np.repeat(newline, n_text))
        doc.extend(body)
        return doc

    def _draw(self, width: int, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw n distinct numbers of `width` digits without leading zeros."""
        low = 10 ** (width - 1)
        return rng.permutation(low + rng.choice(9 * low, n, replace=False, shuffle=False))

    def _spell(self, numbers: NDArray[np.int64], width: int) -> list[Ids]:
        """Return the tokens of numbers of `width` digits."""
        if self.digits is None:
            return [np.array(self.encode(str(number)), dtype=np.int32) for number in numbers]
        return list(self.digits[(numbers[:, None] // 10 ** np.arange(width - 1, -1, -1)) % 10])

    def _numbers(self, width: int, n: int, rng: np.random.Generator) -> list[Ids]:
        return self._spell(self._draw(width, n, rng), width)
