"""Measurements behind `decode=auto`: acceptance of drafts, times of cycles, and time lost by drafting."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median_low
from typing import Any

from longtrain.decoding.roles import TreeShape

MEMORY = 32
"""Cycles that a call's acceptance looks back: each loses 1/32 of its weight with every later one."""
LONG_MEMORY = 256
"""The same of the averages over all calls of a kind, from which a call starts."""
TRUST = 2
"""Most drafts that these weigh at the start of a call: its own text soon counts for more."""
PRIOR = 0.8
"""Acceptance expected of a level of drafts that was not tried lately, with the weight of one draft. It is
optimistic, so that a draft that has been bad is tried again."""
TIMES = 2
"""Measured times of a cycle before they are used: a single one may be an outlier."""
MAX_LOSS = 0.0125
"""Share of plain decoding's time that an engine may lose by drafting."""
RESERVE = 1024
"""Tokens whose share may be lost before they are generated, where a call plans so many, and tokens whose
share may be saved up for later calls, however many were decoded and whatever was gained."""


class Acceptance:
    """Running average of the share of drafts accepted at each level, over the sequences of a batch.

    Shapes that begin with the same widths share their first levels, so chains of all lengths learn from each
    other. A level that was never reached is expected to be like the one above it.

    Args:
        past: the averages over all calls of a kind, which learn too. A call starts from their rates, and
            forgets them as it forgets its own first cycles. None: these are such averages.
    """

    def __init__(self, past: Acceptance | None = None) -> None:
        self._past, self._memory = past, MEMORY if past else LONG_MEMORY
        self._cycles = 0
        self._levels: dict[Hashable, tuple[float, float, int]] = {}  # accepted, tried, last cycle
        self._trusted: dict[Hashable, float] = {}  # share of the prior that the past replaces at the start
        if past:
            for key in past._levels:
                hits, tries = past._known(key)
                if not tries:  # so long ago that its weight has become 0
                    continue
                weight = min(TRUST, tries)
                self._levels[key] = hits * weight / tries, weight, 0
                self._trusted[key] = weight / TRUST

    def learn(self, shape: TreeShape, accepted: Sequence[int]) -> None:
        """Add one cycle.

        Args:
            shape: shape of the drafted tree.
            accepted: number of accepted drafts of each unfinished sequence.
        """
        if self._past:
            self._past.learn(shape, accepted)
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
        kept = self._left(self._cycles)
        for key in keys:
            hits, tries = self._known(key)
            prior = 1 - kept * self._trusted.get(key, 0.0)
            rate = (hits + prior * rate) / (tries + prior)
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
        weight = self._left(self._cycles - known[2])
        return known[0] * weight, known[1] * weight

    def _left(self, cycles: int) -> float:
        """Weight of what was learned so many cycles ago."""
        return float((1 - 1 / self._memory) ** cycles)


class Costs:
    """Measured seconds of a cycle, drafting and verification included, by shape and sequence length.

    Attention makes cycles longer as sequences grow, so a time is valid for one octave of length (a factor of
    2); in a new octave the time of the last known one below is used until there are measurements.
    """

    def __init__(self) -> None:
        self.starts = 0
        """Starts of a draft with its prompts that were measured so far."""
        self.count = 0
        """Cycles measured so far."""
        self.budget = LossBudget()
        """What all calls together have lost and may still risk."""
        self._past: dict[Hashable, tuple[LossBudget, Acceptance]] = {}
        self._starts: dict[int, deque[tuple[int, float]]] = {}  # tokens and seconds, by octave
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

    def learn_start(self, tokens: int, seconds: float) -> None:
        """Add the time of a draft's start with prompts of so many tokens together."""
        self.starts += 1
        self._starts.setdefault(octave_of(tokens), deque(maxlen=5)).append((tokens, seconds))

    def start_s(self, tokens: int) -> float | None:
        """Most seconds of a start with so many tokens; None: fewer than `TIMES` starts were measured.

        A start with more tokens takes no less, and at most as many times as long as it has more tokens: part
        of it does not depend on them. The closest of these bounds counts.
        """
        if self.starts < TIMES:
            return None
        known = (one for starts in self._starts.values() for one in starts)
        return min(seconds * max(1.0, tokens / fewer) for fewer, seconds in known)

    def past(self, kind: Hashable) -> tuple[LossBudget, Acceptance]:
        """What earlier calls of a kind have left for later ones: their budget and acceptance."""
        return self._past.setdefault(kind, (LossBudget(self.budget), Acceptance()))

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
    """Time that drafting has lost against plain decoding, over calls, and the time that it may still risk.

    The loss stays within its share of the time that plain decoding takes for all tokens so far, or for those
    that the present call plans, up to `RESERVE`, if these are more. So what plain calls leave unspent pays
    for a later trial, and so does what drafting gains; but never more than the share of `RESERVE` tokens (of
    each part of a whole) and one start of the draft, so that drafts that have been good for long may not be
    bad for long.

    Args:
        whole: a budget of which this is a part, and within which its loss must stay as well.
    """

    def __init__(self, whole: LossBudget | None = None) -> None:
        self.lost_s = 0.0
        """Seconds lost so far; negative if drafting has saved time; gains that may not be kept left out."""
        self.plain_total_s = 0.0
        """Seconds that plain decoding would have taken for all tokens."""
        self._whole = whole

    def affords(self, risk_s: float, advance_s: float = 0.0) -> bool:
        """True if the loss stays within its share although all of this is lost.

        Args:
            risk_s: seconds that may be lost.
            advance_s: seconds of plain decoding that may be counted before they have passed.
        """
        if risk_s <= 0:
            return True
        share_s = MAX_LOSS * max(self.plain_total_s, advance_s)
        within = self._whole is None or self._whole.affords(risk_s, advance_s)
        return within and self.lost_s + risk_s <= share_s

    def lose(self, seconds: float) -> None:
        """Count time that the draft took outside of cycles: its start, or its restart."""
        self.lost_s += seconds
        if self._whole:
            self._whole.lose(seconds)

    def add(self, tokens: float, seconds: float | None, plain_s: float, start_s: float = 0.0) -> None:
        """Count a cycle.

        Args:
            tokens: its new tokens of a sequence, on average.
            seconds: its time; None: not measured, or without the draft.
            plain_s: seconds of a plain cycle.
            start_s: seconds of the draft's start with the present prompts.
        """
        self.plain_total_s += tokens * plain_s
        gained_s = 0.0 if seconds is None else tokens * plain_s - seconds
        before_s = self.lost_s
        least_s = MAX_LOSS * (self.plain_total_s - RESERVE * plain_s) - start_s
        self.lost_s = max(before_s - gained_s, least_s)
        if self._whole:  # which saves what its parts do: their cycles may take very different times
            self._whole.plain_total_s += tokens * plain_s
            self._whole.lost_s += self.lost_s - before_s


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
