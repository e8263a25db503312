"""Intervals for pooled figures: bootstrap over prompts, paired bootstrap, Wilson.

A pooled figure is a ratio of sums (tokens over cycles, hits over trials): prompts are the unit that is
resampled, so that the cycles of one prompt stay together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from longtrain.errors import DataError
from longtrain.evaluation.strata import LEAST, interval_of_mean, resampled_ratios

CONFIDENCE = 0.95
RESAMPLES = 2000
Figure = tuple[Sequence[float], Sequence[float]]
"""Numerators and denominators, one of each a prompt."""


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

    @property
    def larger_than_noise(self) -> bool:
        """Of a difference: whether the interval leaves out 0, with at least `LEAST` units behind it."""
        return self.n >= LEAST and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]")


NOTHING = Interval(math.nan, math.nan, math.nan, 0)


def wilson(successes: int, trials: int, *, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval for a share, sound near 0 and 1 where the normal one is not.

    Raises:
        DataError: counts that cannot be (more successes than trials, or negative).

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if not 0 <= successes <= trials:
        raise DataError(f"successes={successes} of trials={trials}; allowed: 0 <= successes <= trials")
    if trials == 0:
        return NOTHING
    z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    share = successes / trials
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * trials)) / trials) / (1 + z2 / trials)
    return Interval(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)), trials)


def pooled_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Σ numerators / Σ denominators over prompts, with a percentile bootstrap interval over prompts.

    Args:
        numerators: one a prompt, e.g. tokens emitted.
        denominators: one a prompt, e.g. target forwards; a prompt with 0 counts for nothing.
        seed: of the resampling; equal inputs and seed give equal intervals.
        confidence: of the interval.
        resamples: bootstrap replicates.
    """
    pairs_N2 = _pairs(numerators, denominators)
    if len(pairs_N2) == 0:
        return NOTHING
    draws = np.sort(resampled_ratios(pairs_N2, _draws(len(pairs_N2), resamples, seed)))
    low, high = _percentiles(draws, confidence)
    return _known(_ratio(pairs_N2.sum(0)), low, high, len(pairs_N2))


def paired_difference(
    first: Figure,
    second: Figure,
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Pooled ratio of `first` minus that of `second` over the same prompts, resampled together.

    Args:
        first: (numerators, denominators), one entry a prompt.
        second: the same prompts in the same order.
        seed: of the resampling.
        confidence: of the interval.
        resamples: bootstrap replicates.

    Raises:
        DataError: the two do not have the same number of prompts.
    """
    a_N2, b_N2 = _paired(first, second)
    if len(a_N2) == 0:
        return NOTHING
    index_RN = _draws(len(a_N2), resamples, seed)
    gaps = np.sort(resampled_ratios(a_N2, index_RN) - resampled_ratios(b_N2, index_RN))
    low, high = _percentiles(gaps, confidence)
    return _known(_ratio(a_N2.sum(0)) - _ratio(b_N2.sum(0)), low, high, len(a_N2))


def paired_quotient(
    first: Sequence[float],
    second: Sequence[float],
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Sum of `first` over that of `second` (a policy's right answers over the full cache's), resampled.

    Unlike `pooled_ratio` a prompt counts where its entry of `second` is 0. Draws whose second sum is 0 are
    left out; if that of the prompts themselves is, there is no figure.

    Args:
        first: one entry a prompt.
        second: the same prompts in the same order.
        seed: of the resampling.
        confidence: of the interval.
        resamples: bootstrap replicates.

    Raises:
        DataError: the two do not have the same number of prompts.
    """
    if len(first) != len(second):
        raise DataError(f"paired figures need the same prompts; got {len(first)} and {len(second)}")
    pairs_N2 = np.array([first, second], dtype=float).T.reshape(-1, 2)
    if pairs_N2[:, 1].sum() == 0:
        return NOTHING
    index_RN = _draws(len(pairs_N2), resamples, seed)
    sums_R2 = np.stack([pairs_N2[:, column][index_RN].sum(1) for column in (0, 1)], axis=1)
    sums_R2 = sums_R2[sums_R2[:, 1] > 0]
    low, high = _percentiles(np.sort(sums_R2[:, 0] / sums_R2[:, 1]), confidence)
    return _known(_ratio(pairs_N2.sum(0)), low, high, len(pairs_N2))


def mean_of_ratios(
    strata: Sequence[Figure],
    *,
    of: Callable[[Any], Any] = np.asarray,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    seed: int = 0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """The plain mean over tasks of each task's Σ numerators / Σ denominators, resampled within each task.

    A benchmark's average weighs its tasks alike, however many examples they have; its tasks are fixed, their
    examples are the sample. Tasks with few examples: see `strata`.

    Args:
        strata: one figure a task; a task without a counting prompt is left out.
        of: of each task's ratio before the mean, elementwise on arrays (`np.exp` makes perplexity of nats).
        bounds: the least and the most that the figure can be.
        seed: of the resampling.
        confidence: of the interval.
        resamples: bootstrap replicates.
    """
    used = [(pairs,) for pairs in (_pairs(*figure) for figure in strata) if len(pairs)]
    if not used:
        return NOTHING
    value, low, high = interval_of_mean(
        used, lambda ratios: of(ratios[0]), seed=seed, confidence=confidence, resamples=resamples
    )
    low, high = min(value, max(low, bounds[0])), max(value, min(high, bounds[1]))
    return _known(value, low, high, sum(len(pairs) for (pairs,) in used))


def paired_mean_difference(
    strata: Sequence[tuple[Figure, Figure]],
    *,
    of: Callable[[Any], Any] = np.asarray,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    seed: int = 0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """`mean_of_ratios` of the first figures minus that of the second, each task's prompts drawn together.

    Args:
        strata: (first, second) a task, over the same prompts in the same order; a prompt counts where both
            denominators are above 0.
        of: see `mean_of_ratios`.
        bounds: the least and the most that either figure can be.
        seed: of the resampling.
        confidence: of the interval.
        resamples: bootstrap replicates.

    Raises:
        DataError: the two figures of a task do not have the same number of prompts.
    """
    used = [pair for pair in (_paired(*figures) for figures in strata) if len(pair[0])]
    if not used:
        return NOTHING
    value, low, high = interval_of_mean(
        used,
        lambda ratios: of(ratios[0]) - of(ratios[1]),
        seed=seed,
        confidence=confidence,
        resamples=resamples,
    )
    most = bounds[1] - bounds[0]
    return _known(value, max(low, -most), min(high, most), sum(len(a_N2) for a_N2, _ in used))


def _known(value: float, low: float, high: float, n: int) -> Interval:
    """An interval, or the value alone where it cannot be had."""
    if n < 2 or (n < LEAST and high - low <= 1e-12 * abs(value)):
        return Interval(value, math.nan, math.nan, n)
    return Interval(value, low, high, n)


def _paired(first: Figure, second: Figure) -> tuple[np.ndarray, np.ndarray]:
    if len(first[0]) != len(second[0]):
        raise DataError(f"paired figures need the same prompts; got {len(first[0])} and {len(second[0])}")
    a_N2, b_N2 = (np.asarray(figure, dtype=float).T.reshape(-1, 2) for figure in (first, second))
    used_N = (a_N2[:, 1] > 0) & (b_N2[:, 1] > 0)
    return a_N2[used_N], b_N2[used_N]


def _pairs(numerators: Sequence[float], denominators: Sequence[float]) -> np.ndarray:
    if len(numerators) != len(denominators):
        raise DataError(
            f"{len(numerators)} numerators for {len(denominators)} denominators; give one each a prompt"
        )
    pairs_N2 = np.array([numerators, denominators], dtype=float).T.reshape(-1, 2)
    return pairs_N2[pairs_N2[:, 1] > 0]


def _draws(n: int, resamples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, size=(resamples, n))


def _percentiles(sorted_R: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(sorted_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _ratio(pair_2: np.ndarray) -> float:
    return float(pair_2[0] / pair_2[1])
