"""The host's side of decoding: the texts as they grow, where they end, and what each cycle gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from longtrain.decoding.roles import TreeShape
from longtrain.decoding.stats import Cycle
from longtrain.errors import ConfigError, refusal

Stream: TypeAlias = Callable[[int, list[int], list[bool]], None]
"""Called with (row, new tokens, whether each was drafted) whenever a sequence grows."""


class Decodes(Protocol):
    """The one thing asked of a tokenizer here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """The text of some tokens."""


class Emitted(NamedTuple):
    """What a cycle gives one text, before the text's end is looked for.

    Args:
        tokens: accepted drafts, and one token after them.
        accepted: drafts that the target accepted: one fewer than the tokens, or no fewer than these where the
            cache's limit put some off to the next cycle (`KVCache.commit_limit`).
    """

    tokens: list[int]
    accepted: int

    @property
    def put_off(self) -> int:
        """Tokens that the cycle found and the text has to wait for."""
        return self.accepted + 1 - len(self.tokens)


@dataclass(frozen=True)
class Ending:
    """When a sequence is over.

    A stop string is looked for in the decoded text, so it may begin and end inside tokens. The tokens up to
    the one that completes it are kept; the text is cut right before it.

    Args:
        max_new_tokens: most tokens of a sequence.
        stop_ids: token ids that end a sequence; the token itself is kept as the last one, not in the text.
        stop: stop strings.
        tokenizer: decodes for stop strings and texts; None where there are neither.

    Raises:
        ConfigError: a stop string is empty, or there is no tokenizer for them.
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    tokenizer: Decodes | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not all(self.stop):
            raise refusal(ConfigError, f"stop={self.stop!r}", "a list of strings that are not empty")
        if self.stop and self.tokenizer is None:
            raise ConfigError(
                f"stop strings {list(self.stop)} need a tokenizer and the target has none; pass stop_ids"
            )

    def find(self, tokens: list[int], new: int) -> tuple[int, str]:
        """Where a sequence ends.

        Args:
            tokens: the sequence, uncut.
            new: how many at its end have not been looked at before.

        Returns:
            Its length, and why it ends there: `stop_id`, `stop_string`, `length`, or "" if it goes on.
        """
        first = len(tokens) - new
        end, why = len(tokens), ""
        if end >= self.max_new_tokens:
            end, why = self.max_new_tokens, "length"
        for at in range(first, end):
            if tokens[at] in self.stop_ids:
                end, why = at + 1, "stop_id"
                break
        if self.stop and self._stops(tokens[:end], end - first):
            at = next((at for at in range(first + 1, end) if self._stops(tokens[:at], 1)), end)
            if at < end or why != "stop_id":
                end, why = at, "stop_string"
        return end, why

    def text(self, tokens: list[int], why: str) -> str | None:
        """The text of a finished sequence, without what ended it; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text = self._decode(tokens[:-1] if why == "stop_id" else tokens)
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def _stops(self, tokens: list[int], new: int) -> bool:
        """Whether a stop string ends within the last `new` tokens; a token holds at least one byte of it."""
        longest = max(len(stop.encode()) for stop in self.stop)
        text = self._decode(tokens[-(new + longest + 1) :])
        return any(stop in text for stop in self.stop)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False)) if self.tokenizer else ""


@dataclass
class Output:
    """The sequences of one call: tokens, cycles and reasons to end, a row each."""

    ending: Ending
    rows: int
    stream: Stream | None = None
    tokens: list[list[int]] = field(init=False)
    drafted: list[list[bool]] = field(init=False)
    cycles: list[list[Cycle]] = field(init=False)
    finish: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.rows)]
        self.drafted = [[] for _ in range(self.rows)]
        self.cycles = [[] for _ in range(self.rows)]
        self.finish = ["" for _ in range(self.rows)]

    @property
    def done(self) -> bool:
        """Whether every sequence is over."""
        return all(self.finish)

    def lengths(self) -> list[int]:
        """New tokens so far of each sequence that is not over, or of all where all are over."""
        counts = [len(tokens) for tokens in self.tokens]
        return [count for count, end in zip(counts, self.finish, strict=True) if not end] or counts

    def begin(self, first_B: list[int]) -> list[int]:
        """Take in prefill's token of each row; returns the rows that it ends."""
        return [row for row, token in enumerate(first_B) if self._extend(row, [token], drafted=0)[1]]

    def take(self, emitted: list[Emitted], shape: TreeShape) -> list[int]:
        """Take in what a cycle of a shape emitted, row by row; returns the rows that it ends."""
        over = []
        for row, new in enumerate(emitted):
            if self.finish[row]:
                continue
            position, n = len(self.tokens[row]), len(new.tokens)
            kept, why = self._extend(row, new.tokens, drafted=min(new.accepted, n))
            self.cycles[row].append(
                Cycle(
                    position=position,
                    drafted=shape.depth,
                    nodes=shape.n_nodes - 1,
                    accepted=new.accepted,
                    emitted=kept,
                    ended=why in ("stop_id", "stop_string") and kept < n,
                    put_off=new.put_off,
                )
            )
            if why:
                over.append(row)
        return over

    def texts(self) -> list[str] | None:
        """The text of each row, or None without a tokenizer."""
        texts = [self.ending.text(tokens, why) for tokens, why in zip(self.tokens, self.finish, strict=True)]
        return None if self.ending.tokenizer is None else [text or "" for text in texts]

    def _extend(self, row: int, new: list[int], *, drafted: int) -> tuple[int, str]:
        """Add tokens, the first of them drafts, up to the end; how many were kept, and why it is over."""
        tokens = self.tokens[row]
        before = len(tokens)
        tokens.extend(new)
        end, why = self.ending.find(tokens, len(new))
        del tokens[end:]
        self.finish[row] = why
        flags = [at < drafted for at in range(end - before)]
        self.drafted[row] += flags
        if self.stream is not None:
            self.stream(row, tokens[before:], flags)
        return end - before, why
