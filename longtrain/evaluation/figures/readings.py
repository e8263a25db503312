"""How figures are read from the numbers of records: the scale of a suite, and what it reports beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longtrain.evaluation.figures.acceptance import ACCEPTANCE
from longtrain.evaluation.figures.outcomes import Numbers
from longtrain.evaluation.figures.statistics import (
    NOTHING,
    Bootstrap,
    Interval,
    Ratio,
    mean_of_ratios,
    paired_difference,
    paired_mean_difference,
    paired_quotient,
    pooled_ratio,
    wilson,
)
from longtrain.evaluation.suite import Figure

Json = dict[str, Any]
Share = tuple[float, float]
Pair = tuple[Numbers, Numbers]
"""Numbers of one example with two systems, or in two runs."""


@dataclass(frozen=True)
class Reading:
    """How an outcome gives its share of a suite's score.

    Args:
        share: numbers of a record -> (numerator, denominator); None where there is no figure.
        of: what is made of the ratio of sums, elementwise.
        bounds: the least and the most that the figure can be.
    """

    share: Callable[[Numbers], Share | None]
    of: Callable[[Any], Any] = np.asarray
    bounds: tuple[float, float] = (0.0, math.inf)

    def ratio(self, some: Iterable[Numbers]) -> Ratio:
        """Shares of records; one without a figure has the denominator 0 and counts for nothing."""
        shares = [self.share(numbers) or (0.0, 0.0) for numbers in some]
        return [above for above, _ in shares], [below for _, below in shares]

    def mean(self, strata: Iterable[Iterable[Numbers]], draw: Bootstrap) -> Interval:
        """The mean over strata of their figures."""
        ratios = [self.ratio(some) for some in strata]
        return mean_of_ratios(ratios, draw, of=self.of, bounds=self.bounds)

    def difference(self, strata: Iterable[Sequence[Pair]], draw: Bootstrap) -> Interval:
        """The mean over strata of the first figures minus that of the second, over the same examples."""
        ratios = [(self.ratio(a for a, _ in some), self.ratio(b for _, b in some)) for some in strata]
        return paired_mean_difference(ratios, draw, of=self.of, bounds=self.bounds)


def reading_of(scale: Mapping[str, Any]) -> Reading:
    """How scores are read: `maximum` times the mean score, exp(Σ nats / Σ tokens), or tokens a cycle.

    Args:
        scale: `name` and `maximum` of the suite's scale.
    """
    if scale["name"] == "perplexity":
        return Reading(lambda one: _share(one, "nats", "tokens"), np.exp, (1.0, math.inf))
    if scale["name"] == ACCEPTANCE:  # plain decoding gives one token a cycle
        return Reading(
            lambda one: _share(one, "cycle_tokens", "cycles") or _share(one, "one", "one", "output_tokens"),
            bounds=(1.0, math.inf),
        )
    best = 1.0 if scale["maximum"] is None else scale["maximum"]
    bounds = (0.0, math.inf if scale["maximum"] is None else best)

    def share(one: Numbers) -> Share | None:
        return (best * one["score"], 1.0) if "score" in one else None

    return Reading(share, bounds=bounds)


def figures_of(figures: Sequence[Figure], some: Sequence[Numbers | Pair], draw: Bootstrap) -> Json:
    """Name -> interval of each figure that these records have.

    Args:
        figures: what the suite reports.
        some: numbers of the records, or where there is a full cache beside them pairs of theirs and its own.
        draw: how the bootstrap draws.
    """
    rows = [one if isinstance(one, tuple) else (one,) for one in some]
    found = {one.name: _interval(one, rows, draw) for one in figures}
    return {name: interval.to_json() for name, interval in found.items() if interval.n}


def change_of(figure: Figure, pairs: Sequence[Pair], draw: Bootstrap) -> Interval:
    """A figure of the first records minus that of the second."""
    first, second = _ratios(figure, pairs, sides=2)
    gap = paired_difference(first, second, draw)
    return gap.through(lambda nats: 100 * math.expm1(nats)) if figure.growth else gap


def _interval(figure: Figure, rows: Sequence[tuple[Numbers, ...]], draw: Bootstrap) -> Interval:
    if figure.kind in ("change", "quotient"):
        pairs = [(row[0], row[1]) for row in rows if len(row) == 2]
        if figure.kind == "change":
            return change_of(figure, pairs, draw)
        (mine, _), (whole, _) = _ratios(figure, pairs, sides=2)
        return paired_quotient(mine, whole, draw)
    ((above, below),) = _ratios(figure, rows, sides=1)
    if figure.kind == "wilson":
        return wilson(round(sum(above)), round(sum(below)))
    if figure.kind == "pooled":
        pooled = pooled_ratio((above, below), draw)
        return pooled.through(math.exp) if figure.growth else pooled
    total = math.fsum(below)
    return Interval(math.fsum(above) / total, math.nan, math.nan, len(above)) if total else NOTHING


def _ratios(figure: Figure, rows: Sequence[tuple[Numbers, ...]], *, sides: int) -> list[Ratio]:
    """A figure's two numbers of the first sides of those rows that have them on each of these sides."""
    needed = {figure.above, figure.below}
    there = [row for row in rows if all(needed <= set(one) for one in row[:sides])]
    return [
        ([row[side][figure.above] for row in there], [row[side][figure.below] for row in there])
        for side in range(sides)
    ]


def _share(one: Numbers, above: str, below: str, needs: str = "one") -> Share | None:
    return (one[above], one[below]) if {above, below, needs} <= set(one) else None
