"""Measurements behind `decode=auto`: acceptance of drafts, times of cycles, and time lost by drafting."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median_low
from typing import Any

from longtrain.decoding.roles import TreeShape

MEMORY = 32
"""Cycles that averages of acceptance look back: each loses 1/32 of its weight with every later one."""
PRIOR = 0.8
"""Acceptance expected of a level of drafts that was not tried lately, with the weight of one draft. It is
optimistic, so that a draft that has been bad is tried again."""
TIMES = 2
"""Measured times of a cycle before they are used: a single one may be an outlier."""
MAX_LOSS = 0.0125
"""Share of plain decoding's time that a call may lose by drafting."""
UPFRONT = 128
"""Tokens of a call for which this share may be lost before they are generated."""


class Acceptance:
    """Running average of the share of drafts accepted at each level, over the sequences of a batch.

    Shapes that begin with the same widths share their first levels, so chains of all lengths learn from each
    other. A level that was never reached is expected to be like the one above it.
    """

    def __init__(self) -> None:
        self._cycles = 0
        self._levels: dict[Hashable, tuple[float, float, int]] = {}  # accepted, tried, last cycle

    def learn(self, shape: TreeShape, accepted: Sequence[int]) -> None:
        """Add one cycle.

        Args:
            shape: shape of the drafted tree.
            accepted: number of accepted drafts of each unfinished sequence.
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
        """Probability for each level that a draft is accepted, given that all above it were.

        Args:
            keys: `levels` of a shape.
        """
        rates, rate = [], PRIOR
        for key in keys:
            hits, tries = self._known(key)
            rate = (hits + rate) / (tries + 1)
            rates.append(rate)
        return rates

    def tokens(self, keys: Sequence[Hashable]) -> float:
        """Expected tokens of a cycle, the target's own included."""
        total = reached = 1.0
        for rate in self.rates(keys):
            reached *= rate
            total += reached
        return total

    def _known(self, key: Hashable) -> tuple[float, float]:
        """Drafts accepted and tried at a level, with the weights that they have now."""
        known = self._levels.get(key)
        if known is None:
            return 0.0, 0.0
        weight = (1 - 1 / MEMORY) ** (self._cycles - known[2])
        return known[0] * weight, known[1] * weight


class Costs:
    """Measured seconds of a cycle, drafting and verification included, by shape and sequence length.

    Attention makes cycles longer as sequences grow, so a time is valid for one octave of length (a factor of
    2); in a new octave the time of the last known one below is used until there are measurements.
    """

    def __init__(self) -> None:
        self.restart_s: float | None = None
        """Seconds of the last restart of a paused draft; None: there was none."""
        self.start_s: float | None = None
        """Least seconds that a draft's start took for each token of a prompt; None: not measured."""
        self.count = 0
        """Cycles measured so far."""
        self.plain_total_s = 0.0
        """Seconds that plain decoding would have taken for the tokens of all calls."""
        self.lost_total_s = 0.0
        """Seconds lost by drafting in all calls; negative if it has saved time."""
        self._times: dict[tuple[Hashable, TreeShape, int], deque[float]] = {}

    def learn(self, kind: Hashable, shape: TreeShape, length: int, seconds: float) -> None:
        """Add one cycle.

        Args:
            kind: other conditions that its time depends on (batch size, sampling).
            shape: shape of the drafted tree.
            length: tokens of the longest sequence.
            seconds: its measured time.
        """
        self.count += 1
        self._times.setdefault((kind, shape, octave_of(length)), deque(maxlen=5)).append(seconds)

    def of(self, kind: Hashable, shape: TreeShape, length: int) -> float | None:
        """Median of the latest times of such a cycle in seconds; None: fewer than `TIMES` were measured."""
        for octave in range(octave_of(length), -1, -1):
            times = self._times.get((kind, shape, octave), ())
            if len(times) >= TIMES:
                return median_low(times)
        return None

    def table(self) -> list[dict[str, Any]]:
        """All measurements: widths, shortest length of the octave, median milliseconds, number of times."""
        return [
            {
                "shape": list(shape.widths),
                "children": shape.children.value,
                "tokens_from": 1 << max(0, octave - 1),
                "cycle_ms": 1e3 * median_low(times),
                "times": len(times),
            }
            for (_, shape, octave), times in self._times.items()
        ]


class LossBudget:
    """Time that a call has lost against plain decoding, and the time that it may still risk.

    There are two limits. The call's own loss stays within its share of the time that plain decoding takes
    for its tokens, of which the first `UPFRONT` may be counted before they are there. As an answer may end
    sooner, the loss of all calls together stays within its share as well, with `UPFRONT` tokens in advance
    once and not for every call.

    Args:
        planned: most new tokens of a sequence.
        costs: holds the sums over all calls.
    """

    def __init__(self, planned: int, costs: Costs) -> None:
        self.lost_s = 0.0
        """Seconds lost so far; negative if drafting has saved time."""
        self._costs = costs
        self._upfront = min(planned, UPFRONT)
        self._tokens = 0.0
        self._pending: deque[float] = deque()  # risks of the cycles whose results have not arrived

    def affords(self, risk_s: float, plain_s: float) -> bool:
        """True if the loss stays within its share although all of this and of the pending cycles is lost.

        Args:
            risk_s: seconds that may be lost.
            plain_s: seconds of a plain cycle.
        """
        if risk_s <= 0:
            return True
        risk_s += sum(self._pending)
        own_s = MAX_LOSS * plain_s * max(self._tokens, self._upfront)
        all_s = MAX_LOSS * max(self._costs.plain_total_s, plain_s * UPFRONT)
        return self.lost_s + risk_s <= own_s and self._costs.lost_total_s + risk_s <= all_s

    def lose(self, seconds: float) -> None:
        """Count time that the draft took outside of cycles: its start, or its restart."""
        self.lost_s += seconds
        self._costs.lost_total_s += seconds

    def begin(self, risk_s: float) -> None:
        """A cycle is launched that takes `risk_s` seconds longer than a plain one."""
        self._pending.append(max(0.0, risk_s))

    def end(self, tokens: float, seconds: float | None, plain_s: float | None) -> None:
        """The oldest pending cycle is over.

        Args:
            tokens: its new tokens of a sequence, on average.
            seconds: its time; None: not measured.
            plain_s: seconds of a plain cycle; None: not measured.
        """
        if self._pending:
            self._pending.popleft()
        self._tokens += tokens
        if plain_s is not None:
            self._costs.plain_total_s += tokens * plain_s
            if seconds is not None:
                self.lose(seconds - tokens * plain_s)


def levels(shape: TreeShape) -> tuple[Hashable, ...]:
    """A key for each level of a shape; shapes that draft alike down to a level share its key."""
    if not shape.copied:
        return tuple((shape.children.value, shape.widths[: level + 1]) for level in range(shape.depth))
    beside = (shape.children.value, shape.widths, shape.keep) if shape.widths else ()
    return tuple((beside, "copied", level) for level in range(shape.depth))


def work_of(shape: TreeShape) -> int:
    """The levels that a draft computes for a shape, by which unknown times are estimated; look-up counts as
    one, however many nodes it copies.
    """
    return len(shape.widths) + (shape.copied > 0)


def octave_of(length: int) -> int:
    """Number of the octave of lengths, within which a cycle's time counts as known."""
    return max(0, length).bit_length()
