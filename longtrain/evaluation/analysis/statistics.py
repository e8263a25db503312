"""Confidence intervals of pooled metrics: bootstraps over prompts, paired or not, and Wilson's interval for
shares.

A pooled metric is a ratio of sums (tokens over cycles, hits over trials). Prompts are the resampling unit,
so that the cycles of one prompt stay together. The bootstraps are our own because scipy's resamples the
units of one sample only: it supports neither ratios of sums that skip units nor tasks that share their
spread.

In a mean over tasks, examples are resampled within their task. That gives no spread for a task with one
example and too little for one with a few, so tasks with fewer than `LEAST` examples share a pool of
deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST = 6
"""Units below which no difference is called larger than noise, and below which a task shares its deviations.
Five differences of one sign always give an interval that leaves out 0, and a fair coin gives them in 1 of 16
tries; six in 1 of 32, below 5%.
"""

Ratio = tuple[Sequence[float], Sequence[float]]
"""Numerators and denominators, one of each per prompt."""
MetricArrays = Sequence[np.ndarray]
"""The metrics of a task, each an array of (numerator, denominator) by prompt, with the same
prompts in each.
"""
Combine = Callable[[Sequence[Any]], Any]
"""Computes the reported value of a task, elementwise, from the ratio of sums of each of its metrics."""
NO_BOUNDS = (-math.inf, math.inf)


@dataclass(frozen=True)
class Interval:
    """A metric with its confidence interval and the number of units (prompts, trials) behind it.

    With no data `value`, `low` and `high` are NaN. One prompt, or a few with identical results, have a value
    only: an interval of zero width would look like certainty.
    """

    value: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, float | int | None]:
        """Plain JSON values; NaN becomes null."""
        return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in asdict(self).items()}

    def through(self, function: Callable[[float], float]) -> Interval:
        """The interval of an increasing function of the metric."""
        return Interval(function(self.value), function(self.low), function(self.high), self.n)

    @property
    def larger_than_noise(self) -> bool:
        """True if a difference's interval excludes 0 and at least `LEAST` units are behind it."""
        return self.n >= LEAST and (self.low > 0 or self.high < 0)


NOTHING = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Bootstrap:
    """Settings of a bootstrap; equal inputs and settings give equal intervals.

    Args:
        seed: the seed of the draws.
        resamples: the number of draws.
        confidence: the share of draws inside the interval.
    """

    seed: int = 0
    resamples: int = RESAMPLES
    confidence: float = CONFIDENCE

    def indices(self, n: int) -> np.ndarray:
        """Indices of the resampled prompts, [R, n]."""
        return np.random.default_rng(self.seed).integers(0, n, size=(self.resamples, n))

    def interval(self, value: float, draws_R: np.ndarray, n: int) -> Interval:
        """A percentile interval from the metric's value in each resample."""
        low, high = np.quantile(draws_R, [(1 - self.confidence) / 2, (1 + self.confidence) / 2])
        return _known(value, float(low), float(high), n)


USUAL = Bootstrap()


def wilson(successes: int, trials: int) -> Interval:
    """Wilson's score interval for a share, valid near 0 and 1 where the normal interval is not."""
    from scipy.stats import binomtest  # takes a second to import

    if trials == 0:
        return NOTHING
    found = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(successes / trials, float(found.low), float(found.high), trials)


def pooled_ratio(ratio: Ratio, draw: Bootstrap = USUAL) -> Interval:
    """Σ numerators / Σ denominators over prompts; a prompt with the denominator 0 has no weight."""
    return _pooled(_counting(ratio), lambda ratios: ratios[0], draw)


def paired_difference(first: Ratio, second: Ratio, draw: Bootstrap = USUAL) -> Interval:
    """Pooled ratio of `first` minus that of `second` over the same prompts, resampled together."""
    return _pooled(_counting(first, second), lambda ratios: ratios[0] - ratios[1], draw)


def paired_quotient(first: Sequence[float], second: Sequence[float], draw: Bootstrap = USUAL) -> Interval:
    """Sum of `first` over the sum of `second` (a policy's right answers over the full cache's), resampled
    together.

    Unlike in `pooled_ratio`, a prompt with 0 in `second` counts. Resamples whose second sum is 0 are
    skipped; if the second sum of the prompts themselves is 0, the value is NaN.
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
    """The plain mean over tasks of each task's Σ numerators / Σ denominators, resampled within each task.

    A benchmark's average weighs all tasks equally, however many examples they have; its tasks are fixed,
    their examples are the sample.

    Args:
        strata: one ratio per task; a task without a prompt of non-zero denominator is left out.
        draw: settings of the bootstrap.
        of: the elementwise function applied to each task's ratio before the mean (`np.exp` makes
            a perplexity of nats).
        bounds: the smallest and the largest possible value.
    """
    return _mean([_counting(ratio) for ratio in strata], lambda ratios: of(ratios[0]), draw, bounds)


def paired_mean_difference(
    strata: Sequence[tuple[Ratio, Ratio]],
    draw: Bootstrap = USUAL,
    *,
    of: Callable[[Any], Any] = np.asarray,
    bounds: tuple[float, float] = NO_BOUNDS,
) -> Interval:
    """`mean_of_ratios` of the first ratios minus that of the second, each task's prompts resampled together.

    Args:
        strata: (first, second) for each task, over the same prompts in the same order; a prompt counts if
            both denominators are above 0.
        draw: settings of the bootstrap.
        of: see `mean_of_ratios`.
        bounds: the smallest and the largest possible value of either.
    """
    most = bounds[1] - bounds[0]
    metrics = [_counting(*pair) for pair in strata]
    return _mean(metrics, lambda ratios: of(ratios[0]) - of(ratios[1]), draw, (-most, most))


def paired_mean_quotient(strata: Sequence[tuple[Ratio, Ratio]], draw: Bootstrap = USUAL) -> Interval:
    """The plain mean over tasks of the first ratios over that of the second, each task's prompts resampled
    together.

    Resamples whose second mean is 0 are skipped; if that of the prompts themselves is 0, the value is NaN.
    Arguments are those of `paired_mean_difference`.
    """
    used = [metrics for metrics in (_counting(*pair) for pair in strata) if len(metrics[0])]
    means = [np.mean([_ratio(metrics[side]) for metrics in used]) for side in (0, 1)] if used else [0.0, 0.0]
    if means[1] == 0:
        return NOTHING
    total_2R = np.zeros((2, draw.resamples))
    for place, metrics in enumerate(used):
        n = len(metrics[0])
        index_RN = np.random.default_rng((draw.seed, place)).integers(0, n, size=(draw.resamples, n))
        total_2R += _drawn(metrics, index_RN)
    there_R = total_2R[1] > 0
    count = sum(len(metrics[0]) for metrics in used)
    return draw.interval(float(means[0] / means[1]), np.divide(*total_2R[:, there_R]), count)


def _pooled(metrics: MetricArrays, combine: Combine, draw: Bootstrap) -> Interval:
    """A metric with its percentile interval."""
    n = len(metrics[0])
    if n == 0:
        return NOTHING
    return draw.interval(_read(metrics, combine), combine(_drawn(metrics, draw.indices(n))), n)


def _mean(
    strata: Sequence[MetricArrays], combine: Combine, draw: Bootstrap, bounds: tuple[float, float]
) -> Interval:
    """The mean of the tasks' values, over tasks with at least one prompt, with an interval inside the bounds.

    Deviations of a resample are scaled by sqrt(n / (n - 1)), since a bootstrap over n units has too small a
    variance, and by Student's quantile over the normal one at the degrees of freedom of all tasks together.

    Source: degrees of freedom as in Satterthwaite 1946, "An approximate distribution of estimates of variance
    components".
    """
    from scipy.stats import norm, t  # takes a second to import

    used = [metrics for metrics in strata if len(metrics[0])]
    if not used:
        return NOTHING
    count = sum(len(metrics[0]) for metrics in used)
    value = float(np.mean([_read(metrics, combine) for metrics in used]))
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
    """The point estimate with its interval, or without one if there are too few units."""
    if n < 2 or (n < LEAST and high - low <= 1e-12 * abs(value)):
        return Interval(value, math.nan, math.nan, n)
    return Interval(value, low, high, n)


def _counting(*metrics: Ratio) -> MetricArrays:
    """The metrics without the prompts for which one of them has the denominator 0."""
    arrays = [_pairs(ratio) for ratio in metrics]
    used_N = np.all([pairs_N2[:, 1] > 0 for pairs_N2 in arrays], axis=0)
    return [pairs_N2[used_N] for pairs_N2 in arrays]


def _pairs(ratio: Ratio) -> np.ndarray:
    """A metric as an array with one line (numerator, denominator) per prompt, [N, 2]."""
    return np.array(ratio, dtype=float).T.reshape(-1, 2)


def _ratio(pairs_N2: np.ndarray) -> float:
    """The ratio of sums over all prompts, without resampling."""
    above, below = pairs_N2.sum(0)
    return float(above / below)


def _sums(pairs_N2: np.ndarray, index_RN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numerator and denominator sums of each bootstrap resample."""
    above_R, below_R = (column_N[index_RN].sum(1) for column_N in pairs_N2.T)
    return above_R, below_R


def _drawn(metrics: MetricArrays, index_RN: np.ndarray) -> list[np.ndarray]:
    """The ratio of sums in every resample, for each metric."""
    sums = (_sums(pairs_N2, index_RN) for pairs_N2 in metrics)
    return [above_R / below_R for above_R, below_R in sums]


def _read(metrics: MetricArrays, combine: Combine) -> float:
    """The task's value over all prompts, without resampling."""
    return float(combine([np.asarray(_ratio(pairs_N2)) for pairs_N2 in metrics]))


@dataclass(frozen=True)
class _Stratum:
    """A group of strata that are resampled together.

    Args:
        draws: scale factor -> deviations of the sum of their values, one per resample.
        freedom: degrees of freedom of their variance.
    """

    draws: Callable[[float], np.ndarray]
    freedom: float


def _parts(strata: Sequence[MetricArrays], combine: Combine, draw: Bootstrap) -> list[_Stratum]:
    """Group the tasks for resampling: each task of `LEAST` or more prompts alone, the smaller
    ones together.
    """
    small = [metrics for metrics in strata if len(metrics[0]) < LEAST]
    parts = [
        _alone(metrics, combine, np.random.default_rng((draw.seed, place)), draw.resamples)
        for place, metrics in enumerate(strata)
        if len(metrics[0]) >= LEAST
    ]
    if small:
        lenders = [metrics for metrics in strata if len(metrics[0]) >= LEAST]
        shared = _shared([_units(metrics, combine) for metrics in small])
        if len(shared) < LEAST and lenders:  # borrow the widest: rather too wide than too narrow
            shared = np.concatenate(
                [shared, max((_deviations(_units(f, combine)) for f in lenders), key=np.var)]
            )
        if len(shared):
            rng = np.random.default_rng((draw.seed, len(strata)))
            parts.append(_together(small, shared, rng, draw.resamples))
    return parts


def _alone(metrics: MetricArrays, combine: Combine, rng: np.random.Generator, resamples: int) -> _Stratum:
    """A group of one stratum, resampled over its own prompts."""
    n = len(metrics[0])
    index_RN = rng.integers(0, n, size=(resamples, n))
    middles = [_ratio(pairs_N2) for pairs_N2 in metrics]
    gaps = [
        (drawn_R - middle) * math.sqrt(n / (n - 1))
        for drawn_R, middle in zip(_drawn(metrics, index_RN), middles, strict=True)
    ]

    def draws(stretch: float) -> np.ndarray:
        moved = [middle + stretch * gap for middle, gap in zip(middles, gaps, strict=True)]
        return combine(moved) - _read(metrics, combine)

    return _Stratum(draws, n - 1)


def _together(
    small: Sequence[MetricArrays], shared: np.ndarray, rng: np.random.Generator, resamples: int
) -> _Stratum:
    """A group of small strata that resample a shared pool of deviations."""
    total = np.zeros(resamples)
    for metrics in small:
        n = len(metrics[0])
        total += shared[rng.integers(0, len(shared), size=(resamples, n))].mean(1)
    own = sum(len(metrics[0]) for metrics in small) - sum(len(metrics[0]) > 1 for metrics in small)
    return _Stratum(lambda stretch: stretch * total, max(1, own - any(len(f[0]) == 1 for f in small)))


def _shared(units: Sequence[np.ndarray]) -> np.ndarray:
    """Pool the deviations of small strata, each from its own mean; strata of one unit count as
    one stratum.
    """
    single = [own for own in units if len(own) == 1]
    groups = [own for own in units if len(own) > 1]
    if len(single) > 1:
        groups.append(np.concatenate(single))
    return np.concatenate([_deviations(own) for own in groups]) if groups else np.zeros(0)


def _deviations(units_N: np.ndarray) -> np.ndarray:
    n = len(units_N)
    return (units_N - units_N.mean()) * math.sqrt(n / (n - 1))


def _units(metrics: MetricArrays, combine: Combine) -> np.ndarray:
    """The jackknife's pseudo-values: each prompt's contribution to a stratum's value."""
    n, whole = len(metrics[0]), _read(metrics, combine)
    if n == 1:
        return np.array([whole])
    without = []
    for pairs_N2 in metrics:
        left_N2 = pairs_N2.sum(0) - pairs_N2
        without.append(left_N2[:, 0] / left_N2[:, 1])
    return n * whole - (n - 1) * combine(without)
