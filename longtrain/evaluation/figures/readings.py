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
    paired_quotient,
    pooled_ratio,
    wilson,
)
from longtrain.evaluation.suite import Figure

Json = dict[str, Any]
Share = tuple[float, float]


@dataclass(frozen=True)
class Reading:
    """How an outcome gives its share of a suite's score.

    Args:
        share: numbers of a record -> (numerator, denominator); None where there is no figure.
        of: what is made of the ratio of sums, elementwise.
        bounds: the least and the most that the figure can be.
        wilson: whether each answer is right (`bounds[1]`) or wrong (0).
    """

    share: Callable[[Numbers], Share | None]
    of: Callable[[Any], Any] = np.asarray
    bounds: tuple[float, float] = (0.0, math.inf)
    wilson: bool = False

    def ratio(self, some: Iterable[Numbers]) -> Ratio:
        """Shares of records; one without a figure has the denominator 0 and counts for nothing."""
        shares = [self.share(numbers) or (0.0, 0.0) for numbers in some]
        return [above for above, _ in shares], [below for _, below in shares]

    def mean(self, strata: Iterable[Iterable[Numbers]], draw: Bootstrap) -> Interval:
        """The mean over strata of their figures; Wilson's interval of a single one, if that is asked for."""
        ratios = [self.ratio(some) for some in strata]
        if self.wilson and len(ratios) == 1:
            above, below = (sum(side) for side in ratios[0])
            best = self.bounds[1]
            return wilson(round(above / best), round(below)).through(lambda share: best * share)
        return mean_of_ratios(ratios, draw, of=self.of, bounds=self.bounds)


def reading_of(scale: Mapping[str, Any]) -> Reading:
    """How scores are read: `maximum` times the mean score, exp(Σ nats / Σ tokens), or tokens a cycle.

    Args:
        scale: `name`, `maximum` and, if it is there, `wilson` of the suite's scale.
    """
    if scale["name"] == "perplexity":
        return Reading(lambda one: _share(one, "nats", "tokens"), np.exp, (1.0, math.inf))
    if scale["name"] == ACCEPTANCE:  # plain decoding gives one token a cycle
        return Reading(
            lambda one: _share(one, "cycle_tokens", "cycles") or _share(one, "one", "one", "output_tokens")
        )
    best = 1.0 if scale["maximum"] is None else scale["maximum"]
    bounds = (0.0, math.inf if scale["maximum"] is None else best)

    def share(one: Numbers) -> Share | None:
        return (best * one["score"], 1.0) if "score" in one else None

    return Reading(share, bounds=bounds, wilson=scale.get("wilson", False))


def figures_of(
    figures: Sequence[Figure],
    some: Sequence[Numbers],
    *,
    full: Sequence[Numbers] | None,
    draw: Bootstrap,
) -> Json:
    """Name -> interval of each figure that these records have.

    Args:
        figures: what the suite reports.
        some: numbers of the records.
        full: those of the full cache for the same examples, in their order; None for the full cache itself.
        draw: how the bootstrap draws.
    """
    found = {one.name: _interval(one, some, full, draw) for one in figures}
    return {name: interval.to_json() for name, interval in found.items() if interval.n}


def change_of(
    figure: Figure, first: Sequence[Numbers], second: Sequence[Numbers], draw: Bootstrap
) -> Interval:
    """A figure of the first records minus that of the second, over the same examples in the same order."""
    both = [pair for pair in zip(first, second, strict=True) if all(_has(figure, one) for one in pair)]
    a, b = (_ratio(figure, [pair[side] for pair in both]) for side in (0, 1))
    gap = paired_difference(a, b, draw)
    return gap.through(lambda nats: 100 * math.expm1(nats)) if figure.growth else gap


def _interval(
    figure: Figure, some: Sequence[Numbers], full: Sequence[Numbers] | None, draw: Bootstrap
) -> Interval:
    if figure.kind in ("change", "quotient"):
        if full is None:
            return NOTHING
        if figure.kind == "change":
            return change_of(figure, some, full, draw)
        both = [pair for pair in zip(some, full, strict=True) if all(_has(figure, one) for one in pair)]
        mine, whole = ([pair[side][figure.above] for pair in both] for side in (0, 1))
        return paired_quotient(mine, whole, draw)
    above, below = _ratio(figure, [one for one in some if _has(figure, one)])
    if figure.kind == "wilson":
        return wilson(round(sum(above)), round(sum(below)))
    if figure.kind == "pooled":
        return pooled_ratio((above, below), draw)
    total = math.fsum(below)
    return Interval(math.fsum(above) / total, math.nan, math.nan, len(above)) if total else NOTHING


def _has(figure: Figure, one: Numbers) -> bool:
    return figure.above in one and figure.below in one


def _ratio(figure: Figure, some: Sequence[Numbers]) -> Ratio:
    return [one[figure.above] for one in some], [one[figure.below] for one in some]


def _share(one: Numbers, above: str, below: str, needs: str = "one") -> Share | None:
    return (one[above], one[below]) if {above, below, needs} <= set(one) else None
