"""Cycles as the host sees them: the way of their tokens to it, end conditions, and a record of each cycle.

Shapes: B batch, X numbers of a cycle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from longtrain.decoding.decode_step import COPIED
from longtrain.decoding.roles import TreeShape
from longtrain.decoding.stats import Cycle
from longtrain.errors import ConfigError, refusal

if TYPE_CHECKING:
    from longtrain.decoding.captured import ShapeCycles, Stopwatch
    from longtrain.decoding.control import Control
    from longtrain.decoding.decode_step import CycleState

Stream: TypeAlias = Callable[[int, list[int], list[bool]], None]
"""Called for new tokens of a sequence with (index of the sequence, tokens, flags of the drafted ones)."""


class Decodes(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """Decode tokens to text."""


class Emitted(NamedTuple):
    """Tokens of one sequence in a cycle, before its end conditions are checked.

    Args:
        tokens: accepted drafts, and one token after them.
        accepted: number of accepted drafts: one fewer than the tokens, or more if the cache's limit deferred
            some to the next cycle (`KVCache.commit_limit`).
        copied: number of the accepted drafts that were copied from the text.
    """

    tokens: list[int]
    accepted: int
    copied: int = 0

    @property
    def put_off(self) -> int:
        """Number of accepted tokens that are deferred to the next cycle."""
        return self.accepted + 1 - len(self.tokens)


@dataclass(frozen=True)
class Ending:
    """End conditions of a sequence.

    Stop strings are searched in the decoded text, so one may begin and end inside tokens. The tokens up to
    the one that completes it remain; the text is cut right before it.

    Args:
        max_new_tokens: most tokens of a sequence.
        stop_ids: token ids that end a sequence; the token is the last of the sequence, and not in its text.
        stop: stop strings.
        tokenizer: decodes tokens for stop strings and texts; None if neither is needed.

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
        """Find the end of a sequence.

        Args:
            tokens: the sequence, uncut.
            new: number of tokens at its end that no earlier call has checked.

        Returns:
            Its length, and the reason of its end: `stop_id`, `stop_string`, `length`, or "" if it is
            unfinished.
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
        """The text of a finished sequence, without its stop id or stop string; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text = self._decode(tokens[:-1] if why == "stop_id" else tokens)
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def _stops(self, tokens: list[int], new: int) -> bool:
        """True if a stop string ends within the last `new` tokens. A token has at least one byte."""
        longest = max(len(stop.encode()) for stop in self.stop)
        text = self._decode(tokens[-(new + longest + 1) :])
        return any(stop in text for stop in self.stop)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False)) if self.tokenizer else ""


@dataclass
class Output:
    """Tokens, cycles and end reasons of all sequences of one call, indexed by sequence."""

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
        """True if every sequence is finished."""
        return all(self.finish)

    def lengths(self) -> list[int]:
        """New tokens so far of each unfinished sequence, or of all if all are finished."""
        counts = [len(tokens) for tokens in self.tokens]
        return [count for count, end in zip(counts, self.finish, strict=True) if not end] or counts

    def begin(self, first_B: list[int]) -> list[int]:
        """Add the token that prefill gave to each sequence; returns the sequences that end with it."""
        return [row for row, token in enumerate(first_B) if self._extend(row, [token], drafted=0)[1]]

    def take(self, emitted: list[Emitted], shape: TreeShape) -> list[int]:
        """Add each sequence's tokens of a cycle of a shape; returns the sequences that end in it."""
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
                    copied=new.copied,
                )
            )
            if why:
                over.append(row)
        return over

    def texts(self) -> list[str] | None:
        """The text of each sequence, or None without a tokenizer."""
        texts = [self.ending.text(tokens, why) for tokens, why in zip(self.tokens, self.finish, strict=True)]
        return None if self.ending.tokenizer is None else [text or "" for text in texts]

    def _extend(self, row: int, new: list[int], *, drafted: int) -> tuple[int, str]:
        """Add tokens up to the sequence's end, the first `drafted` of them drafts.

        Returns:
            the number of tokens added, and the reason of the end, empty if there is none.
        """
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


class TokenTransfer:
    """Copies the tokens of cycles to the host without blocking.

    Args:
        late: number of cycles that tokens are read late.
    """

    def __init__(self, late: int) -> None:
        self._late = late
        self._sent: deque[Callable[[], list[list[int]]]] = deque()

    def send(self, news_BX: Tensor) -> None:
        """Start the copy of the tokens of the cycle just launched (`DecodeStep.news_BX`)."""
        if not self._late or not news_BX.is_cuda:
            tokens = news_BX.tolist()
            self._sent.append(lambda: tokens)
            return
        copy = torch.empty(news_BX.shape, dtype=news_BX.dtype, pin_memory=True)
        copy.copy_(news_BX, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(news_BX.device))

        def read() -> list[list[int]]:
            arrived.synchronize()
            return copy.tolist()

        self._sent.append(read)

    def arrived(self, *, rest: bool) -> Iterator[list[Emitted]]:
        """Yield each sequence's tokens, cycle by cycle, but those of the last `late` cycles unless `rest`."""
        for rows in self.arrived_rows(rest=rest):
            yield [Emitted(row[2 : 2 + row[0]], row[1] % COPIED, row[1] // COPIED) for row in rows]

    def arrived_rows(self, *, rest: bool) -> Iterator[list[list[int]]]:
        """Yield the numbers of each sequence as `DecodeStep.news_BX` has them, of the same cycles."""
        while len(self._sent) > (0 if rest else self._late):
            yield self._sent.popleft()()


class _Sent(NamedTuple):
    """A cycle whose tokens have not arrived: its shape, and times of it and of a restart before it."""

    shape: TreeShape
    stopwatch: Stopwatch | None
    restart: Stopwatch | None


def run_cycles(
    cycles: ShapeCycles,
    control: Control,
    out: Output,
    texts: CycleState,
    restart: Callable[[], None],
    *,
    before: int,
    late: int,
) -> Counter[TreeShape]:
    """Run cycles until every sequence is over.

    Args:
        cycles: cycles of the shapes that `control` chooses.
        control: gets a cycle's results when its tokens arrive.
        out: collects the tokens.
        texts: state of the sequences; each is closed as it ends.
        restart: starts the draft with the sequences as they are in `out`.
        before: tokens of the longest prompt.
        late: number of cycles that may be launched before the tokens of an earlier one are read.

    Returns:
        the number of cycles of each shape.
    """
    used: Counter[TreeShape] = Counter()
    transfer, sent = TokenTransfer(late), deque[_Sent]()
    most = out.ending.max_new_tokens
    length = 0

    def take_in(*, rest: bool) -> None:
        for emitted in transfer.arrived(rest=rest):
            one = sent.popleft()
            accepted = [new.accepted for new, end in zip(emitted, out.finish, strict=True) if not end]
            seconds, restart_s = (
                watch.seconds() if watch else None for watch in (one.stopwatch, one.restart)
            )
            control.learn(one.shape, accepted, length=length, seconds=seconds, restart_s=restart_s)
            texts.close(out.take(emitted, one.shape))

    def restart_with_all() -> None:
        take_in(rest=True)  # a restart needs the tokens that are still on their way
        restart()

    while not out.done:
        lengths, was_paused = out.lengths(), control.paused
        length = before + max(lengths)
        if used.total() < most - 1:  # each cycle gives every sequence at least one token
            shape = control.choose(length=length, left=most - min(lengths))
            restarted = cycles.between(restart_with_all) if was_paused and not control.paused else None
            if out.done:
                break
            news_BX, stopwatch = cycles.run(shape, timed=control.times, drafts=not control.paused)
            transfer.send(news_BX)
            sent.append(_Sent(shape, stopwatch, restarted))
            used[shape] += 1
        take_in(rest=used.total() == most - 1)
    return used
