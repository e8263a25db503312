"""Retrieval tasks written into real text: needles, variable chains, tables, quoting and copying.

Every document is a chat over one context with many questions, so that one forward supervises many
retrievals. All work is on token ids (text and phrases are tokenised once); a document is a pure function of
its generator.

Shapes: T tokens of one document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from longtrain.data.wordlist import ADJECTIVES, NOUNS
from longtrain.data.written import ChatIds, Document, Draft, Ids, Role, TextStream
from longtrain.errors import ConfigError

Encode: TypeAlias = Callable[[str], Sequence[int]]

NEEDLE_INTRO = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about them afterwards.\n"
)
CHAIN_INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
TABLE_INTRO = "Here is a table.\n"
QUOTE_INTRO = "Read the text, then quote from it.\n"
COPY_INTRO = "Repeat the following text.\n"
MARGIN = 32
"""Least tokens of text that sentences are hidden in."""


class RetrievalWriter:
    """Writes retrieval documents of an exact length into the text of its streams.

    Args:
        encode: text -> ids, without special tokens.
        chat: the turn marks.
        streams: real text to write into.
        stream_weights: how often each is drawn; None: by tokens.
        separator: token between a stream's documents; written as a line's end inside a chat.

    Raises:
        ConfigError: no streams.
    """

    tasks = ("needles", "chains", "table", "quote", "copy")

    def __init__(
        self,
        encode: Encode,
        chat: ChatIds,
        streams: Sequence[TextStream],
        *,
        stream_weights: Sequence[float] | None = None,
        separator: int = 0,
    ) -> None:
        if not streams:
            raise ConfigError("a retrieval writer needs at least one text stream; got none")
        self.encode, self.streams = encode, list(streams)
        self.user, self.assistant, self.end = (
            np.array(ids, dtype=np.int32) for ids in (chat.user, chat.assistant, chat.end)
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
        self.keys_listed = [self.phrase(f" {w}") for w in ADJECTIVES], [self.phrase(f"-{w}") for w in NOUNS]
        self.keys_made_up = [self.phrase(f" {w}") for w in made_up], [self.phrase(f"-{w}") for w in made_up]

    def write(self, task: str, n_tokens: int, rng: np.random.Generator) -> Document:
        """One document of exactly `n_tokens` tokens (at least 192), with as many questions as fit well.

        Raises:
            ConfigError: unknown task, or too few tokens for it.
        """
        if task not in self.tasks:
            raise ConfigError(f"unknown retrieval task '{task}'; known: {', '.join(self.tasks)}")
        if n_tokens < 192:
            raise ConfigError(f"a retrieval document of {n_tokens} tokens is too short; allowed: 192 or more")
        return getattr(self, f"_{task}")(n_tokens, rng)

    def needle_prompt(
        self, n_tokens: int, n_keys: int, rng: np.random.Generator, *, single: bool = False
    ) -> tuple[list[int], str]:
        """A prompt of exactly `n_tokens` tokens, one value a key and one key asked, and the value expected.

        Args:
            n_tokens: prompt length, chat marks included.
            n_keys: needles hidden, each with another key; where they are is uniform over the text's breaks.
            rng: all randomness.
            single: ask for "the special magic number" instead of "all the special magic numbers".
        """
        keys = self._keys(n_keys, rng, self.keys_listed)
        numbers = self._draw(7, n_keys, rng)
        values = self._spell(numbers, 7)
        asked = int(rng.integers(n_keys))
        tail = np.concatenate([self._question(keys[asked], single=single, opening=True), self.assistant])
        doc = Draft()
        self._context(
            doc, NEEDLE_INTRO, self._needle_runs(keys, [[v] for v in values]), n_tokens - len(tail), rng
        )
        doc.add(Role.PROMPT, tail)
        return np.concatenate(doc.runs).tolist(), str(numbers[asked])

    def phrase(self, text: str) -> Ids:
        """The ids of a fixed piece of text, tokenised once."""
        if text not in self._phrases:
            self._phrases[text] = np.array(self.encode(text), dtype=np.int32)
        return self._phrases[text]

    # Needles: keys with one to four seven-digit values.

    def _needles(self, n_tokens: int, rng: np.random.Generator) -> Document:
        most = max(1, min(48, n_tokens // 110))
        n_keys = int(rng.integers(1, (min(8, most) if rng.random() < 0.4 else most) + 1))
        keys = self._keys(n_keys, rng, self.keys_made_up if rng.random() < 0.3 else self.keys_listed)
        n_values = rng.integers(1, 5, n_keys) if rng.random() < 0.2 else np.ones(n_keys, dtype=int)
        numbers = iter(self._numbers(7, int(n_values.sum()), rng))
        values = [[next(numbers) for _ in range(n)] for n in n_values]
        singular = rng.random() < 0.3
        turns = Draft()
        for at in rng.permutation(n_keys):
            single, opening = singular and len(values[at]) == 1, turns.n == 0
            turn = Draft()
            self._ask(turn, self._question(keys[at], single=single, opening=opening), opening=opening)
            self._answer(turn, keys[at], values[at], single=single)
            if not opening and turns.n + turn.n > 0.45 * n_tokens:
                break
            turns.extend(turn)
        needles = self._needle_runs(keys, values)
        fixed = len(self.user) + len(self.phrase(NEEDLE_INTRO)) + turns.n
        if fixed + sum(max(len(spaced), len(line)) for spaced, line in needles) + MARGIN > n_tokens:
            return self._needles(n_tokens, rng) if len(needles) > 1 else self._copy(n_tokens, rng)
        doc = Draft()
        self._context(doc, NEEDLE_INTRO, needles, n_tokens - turns.n, rng)
        doc.extend(turns)
        return doc.document("needles")

    def _needle_runs(self, keys: list[Ids], values: list[list[Ids]]) -> list[tuple[Ids, Ids]]:
        tails = [
            [key, self.phrase(" is: "), v, self.phrase(".")]
            for key, vs in zip(keys, values, strict=True)
            for v in vs
        ]
        return [self._hidden("One of the special magic numbers for", tail) for tail in tails]

    def _question(self, key: Ids, *, single: bool, opening: bool) -> Ids:
        start = (
            "What is the special magic number for" if single else "What are all the special magic numbers for"
        )
        start = "\n" + start if opening else start
        return np.concatenate([self.phrase(start), key, self.phrase(" mentioned in the provided text?")])

    def _answer(self, doc: Draft, key: Ids, values: list[Ids], *, single: bool) -> None:
        number, verb = ("number", "is") if single else ("numbers", "are")
        doc.add(Role.ANSWER, self.phrase(f"The special magic {number} for"), key)
        doc.add(Role.ANSWER, self.phrase(f" mentioned in the provided text {verb} "))
        for i, value in enumerate(values):
            if i:
                doc.add(Role.ANSWER, self.phrase(", "))
            doc.add(Role.VALUE, value)
        doc.add(Role.ANSWER, self.phrase("."), self.end)

    def _keys(self, n: int, rng: np.random.Generator, words: tuple[list[Ids], list[Ids]]) -> list[Ids]:
        first, second = words
        picked = rng.choice(len(first) * len(second), n, replace=False)
        return [np.concatenate([first[p // len(second)], second[p % len(second)]]) for p in picked.tolist()]

    # Variable chains, tables, quoting, copying.

    def _chains(self, n_tokens: int, rng: np.random.Generator) -> Document:
        lines: list[tuple[Ids, Ids]] = []
        turns = Draft()
        for value in self._numbers(5, int(rng.integers(1, max(2, min(7, n_tokens // 200)))), rng):
            names = [self._name(rng) for _ in range(int(rng.integers(2, 5)))]
            chain = [self._hidden("VAR", [names[0], self.phrase(" = "), value, self.phrase(".")])]
            for a, b in pairwise(names):
                chain.append(self._hidden("VAR", [b, self.phrase(" = VAR"), a, self.phrase(".")]))
            opening = turns.n == 0
            turn = Draft()
            ask = self.phrase(("\n" if opening else "") + "Find all variables that are assigned the value ")
            self._ask(turn, np.concatenate([ask, value, self.phrase(" in the text above.")]), opening=opening)
            turn.add(Role.ANSWER, self.phrase("The variables are:"))
            for i, name in enumerate(names):
                turn.add(Role.VALUE, *([self.phrase(",")] if i else []), name)
            turn.add(Role.ANSWER, self.phrase("."), self.end)
            hidden = sum(len(line) for _, line in lines + chain)
            if not opening and turns.n + turn.n + hidden > 0.7 * n_tokens:
                break
            lines += chain
            turns.extend(turn)
        fixed = len(self.user) + len(self.phrase(CHAIN_INTRO)) + turns.n
        if fixed + sum(max(len(spaced), len(line)) for spaced, line in lines) + MARGIN > n_tokens:
            return self._table(n_tokens, rng)
        doc = Draft()
        self._context(doc, CHAIN_INTRO, lines, n_tokens - turns.n, rng, in_order=True)
        doc.extend(turns)
        return doc.document("chains")

    def _table(self, n_tokens: int, rng: np.random.Generator) -> Document:
        width = int(rng.integers(3, 8))
        sep, newline, look, dot = (self.phrase(text) for text in (": ", "\n", "Look up ", "."))
        intro = self.phrase(TABLE_INTRO)
        digits = max(len(number) for number in self._numbers(width, 1, rng))
        line = 2 * digits + len(sep) + len(newline)
        turn = len(look) + 2 * digits + 2 * len(dot) + len(self.user) + len(self.assistant) + len(self.end)
        room = n_tokens - len(intro) - turn
        n_lines = max(1, min(int(room * rng.uniform(0.2, 0.7)) // line, 400, 10 ** (width - 1)))
        keys, values = self._numbers(width, n_lines, rng), self._numbers(width, n_lines, rng)
        body = Draft()
        body.add(Role.PROMPT, intro)
        for key, value in zip(keys, values, strict=True):
            body.add(Role.PROMPT, key, sep, value, newline)
        n_turns = max(1, min((n_tokens - body.n - len(self.user)) // turn, 2 * n_lines))
        for i, at in enumerate(rng.integers(n_lines, size=n_turns)):
            self._ask(body, np.concatenate([look, keys[at], dot]), opening=i == 0)
            body.add(Role.VALUE, values[at])
            body.add(Role.ANSWER, dot, self.end)
        return self._filled(body, n_tokens, rng).document("table")

    def _quote(self, n_tokens: int, rng: np.random.Generator) -> Document:
        cue, length = 12, int(rng.integers(24, 65))
        intro, newline, ask = (
            self.phrase(t) for t in (QUOTE_INTRO, "\n", "Quote the passage that continues after:")
        )
        turn = len(ask) + cue + length + len(self.user) + len(self.assistant) + len(self.end)
        n_turns = min(int(rng.integers(1, 9)), (n_tokens - 2 * cue - len(intro)) // (2 * turn))
        if n_turns < 1:
            return self._copy(n_tokens, rng)
        n_text = n_tokens - len(intro) - len(newline) - n_turns * turn
        text, breaks = self._text(self._stream(rng), n_text, rng)
        last = n_text - cue - length
        starts = breaks[breaks <= last] if (breaks <= last).any() else np.arange(last + 1)
        doc = Draft()
        doc.add(Role.PROMPT, self.user, intro)
        doc.add(Role.TEXT, text)
        for i, at in enumerate(rng.choice(starts, n_turns)):
            question = np.concatenate([newline[: len(newline) * (i == 0)], ask, text[at : at + cue]])
            self._ask(doc, question, opening=i == 0)
            doc.add(Role.ANSWER, text[at + cue : at + cue + length], self.end)
        return doc.document("quote")

    def _copy(self, n_tokens: int, rng: np.random.Generator) -> Document:
        intro = self.phrase(COPY_INTRO)
        n = (n_tokens - len(intro) - len(self.user) - len(self.assistant) - len(self.end)) // 2
        text, _ = self._text(self._stream(rng), n, rng)
        if rng.random() < 0.5:
            text = rng.permutation(text)
        body = Draft()
        body.add(Role.PROMPT, intro, text, self.assistant)
        body.add(Role.ANSWER, text, self.end)
        return self._filled(body, n_tokens, rng).document("copy")

    # Shared pieces.

    def _stream(self, rng: np.random.Generator) -> TextStream:
        return self.streams[min(int(np.searchsorted(self._edges, rng.random())), len(self.streams) - 1)]

    def _text(self, stream: TextStream, n: int, rng: np.random.Generator) -> tuple[Ids, NDArray[np.int64]]:
        """Text for a chat: where a document ends inside it, a line ends."""
        text, breaks = stream.cut(n, rng)
        text[text == self.separator] = self.phrase("\n")[-1]
        return text, breaks

    def _name(self, rng: np.random.Generator) -> Ids:
        """A variable's name: five capitals, tokenised as a word."""
        return np.array(
            self.encode(" " + "".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 5))), dtype=np.int32
        )

    def _hidden(self, start: str, rest: list[Ids]) -> tuple[Ids, Ids]:
        """A sentence in its two forms: inside a line (a space before it), and as a line of its own."""
        return (
            np.concatenate([self.phrase(" " + start), *rest]),
            np.concatenate([self.phrase(start), *rest, self.phrase("\n")]),
        )

    def _ask(self, doc: Draft, question: Ids, *, opening: bool) -> None:
        """A question; the opening one ends the user's turn that began with the context."""
        doc.add(Role.PROMPT, *([] if opening else [self.user]), question, self.assistant)

    def _context(
        self,
        doc: Draft,
        intro: str,
        hidden: list[tuple[Ids, Ids]],
        n_tokens: int,
        rng: np.random.Generator,
        *,
        in_order: bool = False,
    ) -> None:
        """The first turn's opening, `n_tokens` in all: intro, then text with sentences hidden at breaks."""
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
        for place, which in zip(places.tolist(), order, strict=True):
            doc.add(Role.TEXT, text[last:place])
            doc.add(Role.PROMPT, hidden[which][0 if stream.spaced_V[text[place]] else 1])
            last = place
        doc.add(Role.TEXT, text[last : last + n_tokens - doc.n])

    def _filled(self, body: Draft, n_tokens: int, rng: np.random.Generator) -> Draft:
        """The body as a chat of exactly `n_tokens`, text put before it."""
        doc = Draft()
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
        """N different numbers of `width` digits without leading zeros."""
        low = 10 ** (width - 1)
        return rng.permutation(low + rng.choice(9 * low, n, replace=False, shuffle=False))

    def _spell(self, numbers: NDArray[np.int64], width: int) -> list[Ids]:
        """Tokens of numbers of `width` digits."""
        if self.digits is None:
            return [np.array(self.encode(str(number)), dtype=np.int32) for number in numbers]
        return list(self.digits[(numbers[:, None] // 10 ** np.arange(width - 1, -1, -1)) % 10])

    def _numbers(self, width: int, n: int, rng: np.random.Generator) -> list[Ids]:
        return self._spell(self._draw(width, n, rng), width)
