"""How much to draft: the shape that promises most tokens a second, chosen anew for every cycle.

Two things are known of the past: how often the target accepted drafts at each level, and how long a cycle of
each shape took. The choice for the next cycle follows from them alone, never from what that cycle will draft
or accept; so the law of the text is the same as with any fixed shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, TypeAlias

from longtrain.decoding.roles import Draft, Law, TreeShape, usual_law
from longtrain.errors import ConfigError

Widths: TypeAlias = tuple[int, ...]
CHAINS: tuple[Widths, ...] = tuple((1,) * n for n in (1, 2, 3, 4, 6, 8))
"""What is chosen among where a draft offers nothing else."""
_KEEP = 0.97
"""What a cycle leaves of the weight of earlier ones: some 33 cycles count."""
_FIRST = 0.8
"""Share of first drafts expected to be accepted as long as nothing is known."""
_TRUST = 1.0
"""What an expectation weighs, in drafts tried. Levels not tried for long come back to it, and are tried."""
_TIMES = 2
"""Times of a cycle needed before they are believed: a single one may be an accident."""
_MEMORY = 5
"""Times of a cycle that are kept, the latest."""
_STALE = 1024
"""Timed cycles after which a time is forgotten."""


@dataclass(frozen=True)
class ShapeChoice:
    """Shapes to choose among cycle by cycle; plain decoding is always one of them.

    Args:
        widths: of each shape; empty: those that the draft offers (`Draft`), else chains of 1 to 8.
        law: how children are chosen; None: as usual (`usual_law`).
    """

    widths: tuple[Widths, ...] = ()
    law: Law | None = None

    def shapes(self, draft: Draft | None, *, sampled: bool) -> tuple[TreeShape, ...]:
        """The shapes, smallest first; plain decoding alone without a draft.

        Raises:
            ConfigError: shapes are asked for, and there is no draft.
        """
        if draft is None:
            if any(self.widths):
                raise ConfigError(
                    f"shapes {[list(widths) for widths in self.widths]} ask for a draft and the engine has "
                    "none; pass an artifact that brings one"
                )
            return (TreeShape(()),)
        offered: Sequence[Widths] = self.widths or getattr(draft, "offers", CHAINS)
        found = {TreeShape(())}
        found |= {TreeShape(one, self.law or usual_law(one, sampled=sampled)) for one in offered if one}
        return tuple(sorted(found, key=lambda shape: (shape.depth, shape.n_nodes, shape.widths)))


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
        times = self._times.setdefault((kind, shape, _octave(length)), deque(maxlen=_MEMORY))
        times.append((self._now, seconds))

    def of(self, kind: Hashable, shape: TreeShape, length: int) -> float | None:
        """Seconds of a cycle; None where too little was measured, or too long ago."""
        for octave in range(_octave(length), -1, -1):
            times = self._times.get((kind, shape, octave), ())
            fresh = [seconds for at, seconds in times if self._now - at < _STALE]
            if len(fresh) >= _TIMES:
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


class Control:
    """Chooses the shapes of one call of `Engine.generate`.

    Every cycle it takes the shape with the largest `tokens / seconds`. The time of a shape not measured yet
    is guessed from those of less and greater depth; if the guess makes it the best, it is measured. What was
    learnt wears off, so a draft that was bad once is tried now and then.

    Args:
        shapes: smallest first.
        costs: kept from call to call.
        kind: of these cycles, for `costs`.

    Note: QuantSpec finds its draft length by a search for each data set and model (Appendix G); here none is
        needed, and a text whose predictability changes is followed.
    """

    def __init__(self, shapes: Sequence[TreeShape], costs: Costs, kind: Hashable = ()) -> None:
        self.shapes, self.costs, self.kind = tuple(shapes), costs, kind
        self.acceptance = Acceptance()
        self._levels = [levels(shape) for shape in self.shapes]
        self._largest = max(range(len(self.shapes)), key=lambda i: self.shapes[i].n_nodes)
        self._known: list[float | None] = []
        self._octave, self._age = -1, 0

    @property
    def free(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.shapes) > 1

    def choose(self, *, length: int, left: int) -> TreeShape:
        """The next cycle's shape.

        Args:
            length: tokens of the longest text.
            left: most tokens that any text lacks.
        """
        if not self.free:
            return self.shapes[0]
        known = self._costs_at(length)
        for i in (self._largest, 0):  # a draft makes its room for the largest, once
            if known[i] is None:
                return self.shapes[i]
        best, most = 0, 0.0
        for i, cost in enumerate(known):
            seconds = self._guess(self.shapes[i].depth) if cost is None else cost
            speed = self.acceptance.tokens(self._levels[i][: left - 1]) / seconds
            if speed > most:
                best, most = i, speed
        return self.shapes[best]

    def learn(
        self, shape: TreeShape, accepted: Sequence[int], *, length: int, seconds: float | None = None
    ) -> None:
        """Take in a cycle that is over.

        Args:
            shape: what was drafted.
            accepted: drafts accepted in each text that was not over.
            length: tokens of the longest text.
            seconds: the time that the cycle took; None: not measured.
        """
        if not self.free:
            return
        if accepted:
            self.acceptance.learn(shape, accepted)
        if seconds is not None:
            self.costs.learn(self.kind, shape, length, seconds)
            if self._octave == _octave(length):
                self._known[self.shapes.index(shape)] = self.costs.of(self.kind, shape, length)

    def _costs_at(self, length: int) -> list[float | None]:
        """What cycles of each shape take; all are looked up now and then, for times that are too old."""
        octave = _octave(length)
        self._age += 1
        if self._octave != octave or self._age >= _STALE // 8:
            self._known = [self.costs.of(self.kind, shape, length) for shape in self.shapes]
            self._octave, self._age = octave, 0
        return self._known

    def _guess(self, depth: int) -> float:
        """The cost of a shape by straight lines through the known ones; the nearest beyond them."""
        pairs = zip(self.shapes, self._known, strict=True)
        points = [(shape.depth, cost) for shape, cost in pairs if cost is not None]
        below = max((at for at in points if at[0] <= depth), key=lambda at: (at[0], -at[1]), default=None)
        above = min((at for at in points if at[0] >= depth), default=None)
        if below is None or above is None:
            return (below or above or points[0])[1]
        share = (depth - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
        return below[1] + share * (above[1] - below[1])


def levels(shape: TreeShape) -> tuple[Hashable, ...]:
    """Level by level, what shapes have in common whose drafts down to there are chosen alike."""
    return tuple((shape.law.value, shape.widths[: level + 1]) for level in range(shape.depth))


def _octave(length: int) -> int:
    return max(0, length).bit_length()
