"""Draws of the mean over tasks of each task's figure, sound where tasks have few examples.

Examples are drawn within their task. That says nothing of a task with one example and too little of one with
a few, so tasks with fewer than `LEAST` draw deviations that they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 6
"""Units below which no difference is called larger than noise, and below which a task shares its deviations.
Five differences of one sign always give an interval that leaves out 0, and a fair coin gives them in 1 of 16
tries; six in 1 of 32, below 5%."""

Figures = tuple[np.ndarray, ...]
"""A task's figures: (numerator, denominator) of each prompt, the same prompts in each figure."""
Reading = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Makes what is reported of a task, elementwise, from the ratio of sums of each of its figures."""


def interval_of_mean(
    strata: Sequence[Figures], reading: Reading, *, seed: int, confidence: float, resamples: int
) -> tuple[float, float, float]:
    """The mean over strata of what is read from each, and a percentile interval of it.

    Deviations of a draw are stretched by sqrt(n / (n - 1)), since a bootstrap over n units has too small a
    variance, and by Student's quantile over the normal one at the degrees of freedom of all strata together.

    Args:
        strata: at least one, each with at least one prompt and denominators above 0.
        reading: see `Reading`.
        seed: the seed of the draws.
        resamples: the number of draws.
        confidence: the share of draws inside the interval.

    Returns: value, low, high; with one prompt in all they are the same.

    Source: degrees of freedom as in Satterthwaite 1946, "An approximate distribution of estimates of variance
    components".
    """
    from scipy.stats import norm, t  # takes a second to import

    value = float(np.mean([_read(figures, reading) for figures in strata]))
    parts = _parts(strata, reading, seed=seed, resamples=resamples)
    variances = np.array([part.draws(1.0).var() for part in parts])
    if not variances.sum():
        return value, value, value
    freedom = variances.sum() ** 2 / np.sum(variances**2 / [part.freedom for part in parts])
    tail = 0.5 + confidence / 2
    stretch = t.ppf(tail, freedom) / norm.ppf(tail)
    total = np.sum([part.draws(stretch) for part in parts], axis=0) / len(strata)
    low, high = np.quantile(value + total, [1 - tail, tail])
    return value, float(low), float(high)


@dataclass(frozen=True)
class _Stratum:
    """Strata that are drawn together.

    Args:
        draws: stretch -> deviations of the sum of their figures, one a draw.
        freedom: degrees of freedom of their variance.
    """

    draws: Callable[[float], np.ndarray]
    freedom: float


def _parts(strata: Sequence[Figures], reading: Reading, *, seed: int, resamples: int) -> list[_Stratum]:
    small = [figures for figures in strata if len(figures[0]) < LEAST]
    parts = [
        _alone(figures, reading, np.random.default_rng((seed, place)), resamples)
        for place, figures in enumerate(strata)
        if len(figures[0]) >= LEAST
    ]
    if small:
        lenders = [figures for figures in strata if len(figures[0]) >= LEAST]
        shared = _shared([_units(figures, reading) for figures in small])
        if len(shared) < LEAST and lenders:  # the widest of the others: rather too wide than too narrow
            shared = np.concatenate(
                [shared, max((_deviations(_units(f, reading)) for f in lenders), key=np.var)]
            )
        if len(shared):
            parts.append(_together(small, shared, np.random.default_rng((seed, len(strata))), resamples))
    return parts


def _alone(figures: Figures, reading: Reading, rng: np.random.Generator, resamples: int) -> _Stratum:
    """A stratum whose prompts are drawn anew."""
    n = len(figures[0])
    index_RN = rng.integers(0, n, size=(resamples, n))
    middles = [ratio(pairs_N2.sum(0)) for pairs_N2 in figures]
    gaps = [
        (resampled_ratios(pairs_N2, index_RN) - middle) * math.sqrt(n / (n - 1))
        for pairs_N2, middle in zip(figures, middles, strict=True)
    ]

    def draws(stretch: float) -> np.ndarray:
        moved = [middle + stretch * gap for middle, gap in zip(middles, gaps, strict=True)]
        return reading(moved) - _read(figures, reading)

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


def _units(figures: Figures, reading: Reading) -> np.ndarray:
    """What each prompt adds to a stratum's figure: the jackknife's pseudo-values."""
    n, whole = len(figures[0]), _read(figures, reading)
    if n == 1:
        return np.array([whole])
    without = []
    for pairs_N2 in figures:
        left_N2 = pairs_N2.sum(0) - pairs_N2
        without.append(left_N2[:, 0] / left_N2[:, 1])
    return n * whole - (n - 1) * reading(without)


def _read(figures: Figures, reading: Reading) -> float:
    return float(reading([np.asarray(ratio(pairs_N2.sum(0))) for pairs_N2 in figures]))


def resampled_ratios(pairs_N2: np.ndarray, index_RN: np.ndarray) -> np.ndarray:
    """Ratio of sums of each draw of prompts."""
    sums_R2 = np.stack([pairs_N2[:, column][index_RN].sum(1) for column in (0, 1)], axis=1)
    return sums_R2[:, 0] / sums_R2[:, 1]


def ratio(pair_2: np.ndarray) -> float:
    """The first number over the second."""
    return float(pair_2[0] / pair_2[1])
