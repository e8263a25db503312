"""What past cycles tell: the share of drafts accepted, times taken, and time lost against plain decoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median_low
from typing import Any

from longtrain.decoding.roles import TreeShape

_KEEP = 0.97
"""What a cycle leaves of the weight of earlier ones: some 33 cycles count."""
_FIRST = 0.8
"""Share of first drafts expected to be accepted as long as nothing is known."""
_TRUST = 1.0
"""What an expectation weighs, in drafts tried. Levels not tried for long come back to it, and are tried."""
TIMES = 2
"""Times of a cycle needed before they are believed: a single one may be an accident."""
_MEMORY = 5
"""Times of a cycle that are kept, the latest."""
STALE = 1024
"""Timed cycles after which a time is forgotten."""
_SHARE = 0.0125
"""Share of plain decoding's time that drafts may lose."""
_TRIALS = 2
"""Trials of one kind that a call must be able to afford before it makes one."""
AHEAD = 128
"""Tokens of a call whose share may be lost before they are there."""


class Acceptance:
    """The share of drafts accepted at each level: a running mean over the texts of a batch.

    Shapes that begin with the same widths share their first levels, so every chain learns from every other. A
    level that was never reached is expected to be like the one above it.
    """

    def __init__(self) -> None:
        self._cycles = 0
        self._levels: dict[Hashable, tuple[float, float, int]] = {}  # accepted, tried, at which cycle

    def learn(self, shape: TreeShape, accepted: Sequence[int]) -> None:
        """Take in one cycle.

        Args:
            shape: what was drafted.
            accepted: drafts accepted in each text that is not over.
        """
        self._cycles += 1
        for level, key in enumerate(levels(shape)):
            tried = sum(count >= level for count in accepted)
            if not tried:
                return
            hits, tries = self._known(key)
            hits += sum(count > level for count in accepted) / len(accepted)
            self._levels[key] = hits, tries + tried / len(accepted), self._cycles

    def rates(self, keys: Sequence[Hashable]) -> list[float]:
        """Level by level, the probability that a draft is accepted where one was at every level above.

        Args:
            keys: `levels` of a shape.
        """
        rates, rate = [], _FIRST
        for key in keys:
            hits, tries = self._known(key)
            rate = (hits + _TRUST * rate) / (tries + _TRUST)
            rates.append(rate)
        return rates

    def tokens(self, keys: Sequence[Hashable]) -> float:
        """Tokens that a cycle is expected to give, the target's own included."""
        total = reached = 1.0
        for rate in self.rates(keys):
            reached *= rate
            total += reached
        return total

    def _known(self, key: Hashable) -> tuple[float, float]:
        """Drafts accepted and tried at a level, earlier ones counting less."""
        known = self._levels.get(key)
        if known is None:
            return 0.0, 0.0
        kept = _KEEP ** (self._cycles - known[2])
        return known[0] * kept, known[1] * kept


class Costs:
    """What a cycle takes, drafting and verifying, in seconds: medians of measured times.

    Attention makes cycles longer as texts grow, so a time counts for one octave of length; in a new octave
    the last known one below is believed until there are times.
    """

    def __init__(self) -> None:
        self.waking_s: float | None = None
        """Seconds that taking a draft in again took last; None: none was."""
        self._now = 0
        self._times: dict[tuple[Hashable, TreeShape, int], deque[tuple[int, float]]] = {}

    def learn(self, kind: Hashable, shape: TreeShape, length: int, seconds: float) -> None:
        """Take in one cycle.

        Args:
            kind: what else a cycle's time depends on (batch, sampling).
            shape: what was drafted.
            length: tokens of the longest text.
            seconds: the time that it took.
        """
        self._now += 1
        times = self._times.setdefault((kind, shape, octave_of(length)), deque(maxlen=_MEMORY))
        times.append((self._now, seconds))

    def of(self, kind: Hashable, shape: TreeShape, length: int) -> float | None:
        """Seconds of a cycle; None where too little was measured, or too long ago."""
        for octave in range(octave_of(length), -1, -1):
            times = self._times.get((kind, shape, octave), ())
            fresh = [seconds for at, seconds in times if self._now - at < STALE]
            if len(fresh) >= TIMES:
                return median_low(fresh)
        return None

    def table(self) -> list[dict[str, Any]]:
        """Everything measured: widths, the octave's first length, median milliseconds and how many times."""
        return [
            {
                "shape": list(shape.widths),
                "law": shape.law.value,
                "tokens_from": 1 << max(0, octave - 1),
                "cycle_ms": 1e3 * median_low(seconds for _, seconds in times),
                "times": len(times),
            }
            for (_, shape, octave), times in self._times.items()
        ]


class Account:
    """What a call has lost against plain decoding, in seconds; below zero where it has won.

    Args:
        planned: most new tokens of a text.
    """

    def __init__(self, planned: int) -> None:
        self._ahead = min(planned, AHEAD)
        self._tokens = self.lost_s = 0.0
        self._open: deque[float] = deque()

    def affords(self, risk_s: float, plain_s: float, *, before_s: float = 0.0) -> bool:
        """Whether the call stays within its share if this is lost more than once, and all that is under way.

        Args:
            risk_s: seconds that a cycle takes beyond a plain one.
            plain_s: seconds of a plain cycle.
            before_s: seconds that are lost once before it.
        """
        share_s = _SHARE * plain_s * max(self._tokens, self._ahead)
        return risk_s <= 0 or self.lost_s + sum(self._open) + before_s + _TRIALS * risk_s <= share_s

    def begin(self, risk_s: float) -> None:
        """A cycle is launched."""
        self._open.append(max(0.0, risk_s))

    def end(self, tokens: float, seconds: float | None, plain_s: float | None) -> None:
        """The oldest cycle under way is over.

        Args:
            tokens: those that it gave a text, on average.
            seconds: what it took; None: not known.
            plain_s: seconds of a plain cycle; None: not known.
        """
        if self._open:
            self._open.popleft()
        self._tokens += tokens
        if seconds is not None and plain_s is not None:
            self.lost_s += seconds - tokens * plain_s


def levels(shape: TreeShape) -> tuple[Hashable, ...]:
    """Level by level, what shapes have in common whose drafts down to there are chosen alike."""
    return tuple((shape.law.value, shape.widths[: level + 1]) for level in range(shape.depth))


def octave_of(length: int) -> int:
    """The octave of a length: within one, a cycle's time counts as known."""
    return max(0, length).bit_length()
