"""Intervals for pooled figures: bootstraps over prompts, paired or not, and Wilson's interval for shares.

A pooled figure is a ratio of sums (tokens over cycles, hits over trials). Prompts are the unit that is drawn
anew, so that the cycles of one prompt stay together. The bootstraps are our own because scipy's draws the
units of one sample alone: it knows neither ratios of sums that leave units out nor tasks that share their
spread.

In a mean over tasks, examples are drawn within their task. That says nothing of a task with one example and
too little of one with a few, so tasks with fewer than `LEAST` draw deviations that they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from longtrain.errors import DataError

CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST = 6
"""Units below which no difference is called larger than noise, and below which a task shares its deviations.
Five differences of one sign always give an interval that leaves out 0, and a fair coin gives them in 1 of 16
tries; six in 1 of 32, below 5%."""

Ratio = tuple[Sequence[float], Sequence[float]]
"""Numerators and denominators, one of each a prompt."""
Figures = Sequence[np.ndarray]
"""A task's figures: (numerator, denominator) of each prompt, the same prompts in each figure."""
Combine = Callable[[Sequence[Any]], Any]
"""Makes what is reported of a task, elementwise, from the ratio of sums of each of its figures."""
NO_BOUNDS = (-math.inf, math.inf)


@dataclass(frozen=True)
class Interval:
    """A figure with its interval and the number of units (prompts, trials) behind it.

    With no data `value`, `low` and `high` are NaN. One prompt, or a few that all say the same, have a value
    alone: an interval of no width would look like certainty.
    """

    value: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, float | int | None]:
        """Plain JSON values; NaN becomes null."""
        return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in asdict(self).items()}

    def through(self, function: Callable[[float], float]) -> Interval:
        """The interval of a growing function of the figure."""
        return Interval(function(self.value), function(self.low), function(self.high), self.n)

    @property
    def larger_than_noise(self) -> bool:
        """Whether a difference's interval leaves out 0, with at least `LEAST` units behind it."""
        return self.n >= LEAST and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]")


NOTHING = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Bootstrap:
    """How a bootstrap draws; equal inputs and settings give equal intervals.

    Args:
        seed: the seed of the draws.
        resamples: the number of draws.
        confidence: the share of draws inside the interval.
    """

    seed: int = 0
    resamples: int = RESAMPLES
    confidence: float = CONFIDENCE

    def indices(self, n: int) -> np.ndarray:
        """Which of `n` prompts each draw holds."""
        return np.random.default_rng(self.seed).integers(0, n, size=(self.resamples, n))

    def interval(self, value: float, draws_R: np.ndarray, n: int) -> Interval:
        """A percentile interval from the figure of each draw."""
        low, high = np.quantile(draws_R, [(1 - self.confidence) / 2, (1 + self.confidence) / 2])
        return _known(value, float(low), float(high), n)


USUAL = Bootstrap()


def wilson(successes: int, trials: int, *, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval for a share, sound near 0 and 1 where the normal one is not.

    Raises:
        DataError: counts that cannot be (more successes than trials, or negative).
    """
    from scipy.stats import binomtest  # takes a second to import

    if not 0 <= successes <= trials:
        raise DataError(f"{successes} successes in {trials} trials; no count can be above its trials")
    if trials == 0:
        return NOTHING
    found = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return Interval(successes / trials, float(found.low), float(found.high), trials)


def pooled_ratio(figure: Ratio, draw: Bootstrap = USUAL) -> Interval:
    """Σ numerators / Σ denominators over prompts; a prompt with the denominator 0 counts for nothing."""
    return _pooled(_counting(figure), lambda ratios: ratios[0], draw)


def paired_difference(first: Ratio, second: Ratio, draw: Bootstrap = USUAL) -> Interval:
    """Pooled ratio of `first` minus that of `second` over the same prompts, drawn together.

    Raises:
        DataError: the two do not have the same number of prompts.
    """
    return _pooled(_counting(first, second), lambda ratios: ratios[0] - ratios[1], draw)


def paired_quotient(first: Sequence[float], second: Sequence[float], draw: Bootstrap = USUAL) -> Interval:
    """Sum of `first` over that of `second` (a policy's right answers over the full cache's), drawn together.

    Unlike in `pooled_ratio` a prompt counts where its entry of `second` is 0. Draws whose second sum is 0 are
    left out; if that of the prompts themselves is, there is no figure.

    Raises:
        DataError: the two do not have the same number of prompts.
    """
    pairs_N2 = _pairs((first, second))
    if pairs_N2[:, 1].sum() == 0:
        return NOTHING
    above_R, below_R = _sums(pairs_N2, draw.indices(len(pairs_N2)))
    there_R = below_R > 0
    return draw.interval(_ratio(pairs_N2), above_R[there_R] / below_R[there_R], len(pairs_N2))


def mean_of_ratios(
    strata: Sequence[Ratio],
    draw: Bootstrap = USUAL,
    *,
    of: Callable[[Any], Any] = np.asarray,
    bounds: tuple[float, float] = NO_BOUNDS,
) -> Interval:
    """The plain mean over tasks of each task's Σ numerators / Σ denominators, drawn anew within each task.

    A benchmark's average weighs its tasks alike, however many examples they have; its tasks are fixed, their
    examples are the sample.

    Args:
        strata: one figure a task; a task without a counting prompt is left out.
        draw: how the bootstrap draws.
        of: what is made of each task's ratio before the mean, elementwise on arrays (`np.exp` makes
            perplexity of nats).
        bounds: the least and the most that the figure can be.
    """
    return _mean([_counting(figure) for figure in strata], lambda ratios: of(ratios[0]), draw, bounds)


def paired_mean_difference(
    strata: Sequence[tuple[Ratio, Ratio]],
    draw: Bootstrap = USUAL,
    *,
    of: Callable[[Any], Any] = np.asarray,
    bounds: tuple[float, float] = NO_BOUNDS,
) -> Interval:
    """`mean_of_ratios` of the first figures minus that of the second, each task's prompts drawn together.

    Args:
        strata: (first, second) a task, over the same prompts in the same order; a prompt counts where both
            denominators are above 0.
        draw: how the bootstrap draws.
        of: see `mean_of_ratios`.
        bounds: the least and the most that either figure can be.

    Raises:
        DataError: the two figures of a task do not have the same number of prompts.
    """
    most = bounds[1] - bounds[0]
    figures = [_counting(*pair) for pair in strata]
    return _mean(figures, lambda ratios: of(ratios[0]) - of(ratios[1]), draw, (-most, most))


def _pooled(figures: Figures, combine: Combine, draw: Bootstrap) -> Interval:
    """A figure with a percentile interval."""
    n = len(figures[0])
    if n == 0:
        return NOTHING
    return draw.interval(_read(figures, combine), combine(_drawn(figures, draw.indices(n))), n)


def _mean(
    strata: Sequence[Figures], combine: Combine, draw: Bootstrap, bounds: tuple[float, float]
) -> Interval:
    """The mean of what is reported of each task that has a prompt, with an interval inside the bounds.

    Deviations of a draw are stretched by sqrt(n / (n - 1)), since a bootstrap over n units has too small a
    variance, and by Student's quantile over the normal one at the degrees of freedom of all tasks together.

    Source: degrees of freedom as in Satterthwaite 1946, "An approximate distribution of estimates of variance
    components".
    """
    from scipy.stats import norm, t  # takes a second to import

    used = [figures for figures in strata if len(figures[0])]
    if not used:
        return NOTHING
    count = sum(len(figures[0]) for figures in used)
    value = float(np.mean([_read(figures, combine) for figures in used]))
    parts = _parts(used, combine, draw)
    variances = np.array([part.draws(1.0).var() for part in parts])
    if not variances.sum():
        return _known(value, value, value, count)
    freedom = variances.sum() ** 2 / np.sum(variances**2 / [part.freedom for part in parts])
    tail = 0.5 + draw.confidence / 2
    stretch = t.ppf(tail, freedom) / norm.ppf(tail)
    total_R = np.sum([part.draws(stretch) for part in parts], axis=0) / len(used)
    low, high = (float(end) for end in np.quantile(value + total_R, [1 - tail, tail]))
    return _known(value, min(value, max(low, bounds[0])), max(value, min(high, bounds[1])), count)


def _known(value: float, low: float, high: float, n: int) -> Interval:
    """An interval, or the value alone where it cannot be had."""
    if n < 2 or (n < LEAST and high - low <= 1e-12 * abs(value)):
        return Interval(value, math.nan, math.nan, n)
    return Interval(value, low, high, n)


def _counting(*figures: Ratio) -> Figures:
    """Figures of the same prompts, without the prompts for which one of them has the denominator 0."""
    arrays = [_pairs(figure) for figure in figures]
    if len({len(pairs_N2) for pairs_N2 in arrays}) > 1:
        raise DataError(
            f"paired figures need the same prompts; got {' and '.join(str(len(a)) for a in arrays)}"
        )
    used_N = np.all([pairs_N2[:, 1] > 0 for pairs_N2 in arrays], axis=0)
    return [pairs_N2[used_N] for pairs_N2 in arrays]


def _pairs(figure: Ratio) -> np.ndarray:
    """A figure as an array with a line a prompt."""
    above, below = figure
    if len(above) != len(below):
        raise DataError(
            f"{len(above)} numerators for {len(below)} denominators; give the same prompts, one of each"
        )
    return np.array([above, below], dtype=float).T.reshape(-1, 2)


def _ratio(pairs_N2: np.ndarray) -> float:
    """The ratio of sums of the prompts as they are."""
    above, below = pairs_N2.sum(0)
    return float(above / below)


def _sums(pairs_N2: np.ndarray, index_RN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums above and below the line of every draw of prompts."""
    above_R, below_R = (column_N[index_RN].sum(1) for column_N in pairs_N2.T)
    return above_R, below_R


def _drawn(figures: Figures, index_RN: np.ndarray) -> list[np.ndarray]:
    """The ratio of sums of every draw of prompts, figure by figure."""
    sums = (_sums(pairs_N2, index_RN) for pairs_N2 in figures)
    return [above_R / below_R for above_R, below_R in sums]


def _read(figures: Figures, combine: Combine) -> float:
    """What is reported of a task's prompts as they are."""
    return float(combine([np.asarray(_ratio(pairs_N2)) for pairs_N2 in figures]))


@dataclass(frozen=True)
class _Stratum:
    """Strata that are drawn together.

    Args:
        draws: stretch -> deviations of the sum of their figures, one a draw.
        freedom: degrees of freedom of their variance.
    """

    draws: Callable[[float], np.ndarray]
    freedom: float


def _parts(strata: Sequence[Figures], combine: Combine, draw: Bootstrap) -> list[_Stratum]:
    """Each task of `LEAST` prompts or more alone, and the smaller ones together."""
    small = [figures for figures in strata if len(figures[0]) < LEAST]
    parts = [
        _alone(figures, combine, np.random.default_rng((draw.seed, place)), draw.resamples)
        for place, figures in enumerate(strata)
        if len(figures[0]) >= LEAST
    ]
    if small:
        lenders = [figures for figures in strata if len(figures[0]) >= LEAST]
        shared = _shared([_units(figures, combine) for figures in small])
        if len(shared) < LEAST and lenders:  # the widest of the others: rather too wide than too narrow
            shared = np.concatenate(
                [shared, max((_deviations(_units(f, combine)) for f in lenders), key=np.var)]
            )
        if len(shared):
            rng = np.random.default_rng((draw.seed, len(strata)))
            parts.append(_together(small, shared, rng, draw.resamples))
    return parts


def _alone(figures: Figures, combine: Combine, rng: np.random.Generator, resamples: int) -> _Stratum:
    """A stratum whose prompts are drawn anew."""
    n = len(figures[0])
    index_RN = rng.integers(0, n, size=(resamples, n))
    middles = [_ratio(pairs_N2) for pairs_N2 in figures]
    gaps = [
        (drawn_R - middle) * math.sqrt(n / (n - 1))
        for drawn_R, middle in zip(_drawn(figures, index_RN), middles, strict=True)
    ]

    def draws(stretch: float) -> np.ndarray:
        moved = [middle + stretch * gap for middle, gap in zip(middles, gaps, strict=True)]
        return combine(moved) - _read(figures, combine)

    return _Stratum(draws, n - 1)


def _together(
    small: Sequence[Figures], shared: np.ndarray, rng: np.random.Generator, resamples: int
) -> _Stratum:
    """Strata that draw from the same deviations."""
    total = np.zeros(resamples)
    for figures in small:
        n = len(figures[0])
        total += shared[rng.integers(0, len(shared), size=(resamples, n))].mean(1)
    own = sum(len(figures[0]) for figures in small) - sum(len(figures[0]) > 1 for figures in small)
    return _Stratum(lambda stretch: stretch * total, max(1, own - any(len(f[0]) == 1 for f in small)))


def _shared(units: Sequence[np.ndarray]) -> np.ndarray:
    """Deviations of small strata, each from its own mean; strata of one unit count as one stratum."""
    single = [own for own in units if len(own) == 1]
    groups = [own for own in units if len(own) > 1]
    if len(single) > 1:
        groups.append(np.concatenate(single))
    return np.concatenate([_deviations(own) for own in groups]) if groups else np.zeros(0)


def _deviations(units_N: np.ndarray) -> np.ndarray:
    n = len(units_N)
    return (units_N - units_N.mean()) * math.sqrt(n / (n - 1))


def _units(figures: Figures, combine: Combine) -> np.ndarray:
    """What each prompt adds to a stratum's figure: the jackknife's pseudo-values."""
    n, whole = len(figures[0]), _read(figures, combine)
    if n == 1:
        return np.array([whole])
    without = []
    for pairs_N2 in figures:
        left_N2 = pairs_N2.sum(0) - pairs_N2
        without.append(left_N2[:, 0] / left_N2[:, 1])
    return n * whole - (n - 1) * combine(without)
