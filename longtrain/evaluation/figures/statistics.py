"""Intervals for pooled figures: bootstraps over prompts, paired or not, and Wilson's interval for shares.

A pooled figure is a ratio of sums (tokens over cycles, hits over trials). Prompts are the unit that is drawn
anew, so that the cycles of one prompt stay together. The bootstraps are our own because scipy's draws the
units of one sample alone: it knows neither ratios of sums that leave units out nor strata that share their
spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from longtrain.errors import DataError
from longtrain.evaluation.figures.strata import LEAST, interval_of_mean, ratio, resampled_ratios

CONFIDENCE = 0.95
RESAMPLES = 2000
Ratio = tuple[Sequence[float], Sequence[float]]
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
    pairs_N2 = _pairs(figure)
    if len(pairs_N2) == 0:
        return NOTHING
    draws_R = resampled_ratios(pairs_N2, draw.indices(len(pairs_N2)))
    return draw.interval(ratio(pairs_N2.sum(0)), draws_R, len(pairs_N2))


def paired_difference(first: Ratio, second: Ratio, draw: Bootstrap = USUAL) -> Interval:
    """Pooled ratio of `first` minus that of `second` over the same prompts, drawn together.

    Raises:
        DataError: the two do not have the same number of prompts.
    """
    a_N2, b_N2 = _paired(first, second)
    if len(a_N2) == 0:
        return NOTHING
    index_RN = draw.indices(len(a_N2))
    gaps_R = resampled_ratios(a_N2, index_RN) - resampled_ratios(b_N2, index_RN)
    return draw.interval(ratio(a_N2.sum(0)) - ratio(b_N2.sum(0)), gaps_R, len(a_N2))


def paired_quotient(first: Sequence[float], second: Sequence[float], draw: Bootstrap = USUAL) -> Interval:
    """Sum of `first` over that of `second` (a policy's right answers over the full cache's), drawn together.

    Unlike in `pooled_ratio` a prompt counts where its entry of `second` is 0. Draws whose second sum is 0 are
    left out; if that of the prompts themselves is, there is no figure.

    Raises:
        DataError: the two do not have the same number of prompts.
    """
    if len(first) != len(second):
        raise DataError(f"paired figures need the same prompts; got {len(first)} and {len(second)}")
    pairs_N2 = np.array([first, second], dtype=float).T.reshape(-1, 2)
    if pairs_N2[:, 1].sum() == 0:
        return NOTHING
    index_RN = draw.indices(len(pairs_N2))
    sums_R2 = np.stack([pairs_N2[:, column][index_RN].sum(1) for column in (0, 1)], axis=1)
    sums_R2 = sums_R2[sums_R2[:, 1] > 0]
    return draw.interval(ratio(pairs_N2.sum(0)), sums_R2[:, 0] / sums_R2[:, 1], len(pairs_N2))


def mean_of_ratios(
    strata: Sequence[Ratio],
    draw: Bootstrap = USUAL,
    *,
    of: Callable[[Any], Any] = np.asarray,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    """The plain mean over tasks of each task's Σ numerators / Σ denominators, drawn anew within each task.

    A benchmark's average weighs its tasks alike, however many examples they have; its tasks are fixed, their
    examples are the sample. Tasks with few examples: see `strata`.

    Args:
        strata: one figure a task; a task without a counting prompt is left out.
        draw: how the bootstrap draws.
        of: what is made of each task's ratio before the mean, elementwise on arrays (`np.exp` makes
            perplexity of nats).
        bounds: the least and the most that the figure can be.
    """
    used = [(pairs,) for pairs in map(_pairs, strata) if len(pairs)]
    if not used:
        return NOTHING
    value, low, high = interval_of_mean(used, lambda ratios: of(ratios[0]), **vars(draw))
    low, high = min(value, max(low, bounds[0])), max(value, min(high, bounds[1]))
    return _known(value, low, high, sum(len(pairs) for (pairs,) in used))


def paired_mean_difference(
    strata: Sequence[tuple[Ratio, Ratio]],
    draw: Bootstrap = USUAL,
    *,
    of: Callable[[Any], Any] = np.asarray,
    bounds: tuple[float, float] = (-math.inf, math.inf),
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
    used = [pair for pair in (_paired(*figures) for figures in strata) if len(pair[0])]
    if not used:
        return NOTHING
    value, low, high = interval_of_mean(used, lambda ratios: of(ratios[0]) - of(ratios[1]), **vars(draw))
    most = bounds[1] - bounds[0]
    return _known(value, max(low, -most), min(high, most), sum(len(a_N2) for a_N2, _ in used))


def _known(value: float, low: float, high: float, n: int) -> Interval:
    """An interval, or the value alone where it cannot be had."""
    if n < 2 or (n < LEAST and high - low <= 1e-12 * abs(value)):
        return Interval(value, math.nan, math.nan, n)
    return Interval(value, low, high, n)


def _paired(first: Ratio, second: Ratio) -> tuple[np.ndarray, np.ndarray]:
    if len(first[0]) != len(second[0]):
        raise DataError(f"paired figures need the same prompts; got {len(first[0])} and {len(second[0])}")
    a_N2, b_N2 = (np.asarray(figure, dtype=float).T.reshape(-1, 2) for figure in (first, second))
    used_N = (a_N2[:, 1] > 0) & (b_N2[:, 1] > 0)
    return a_N2[used_N], b_N2[used_N]


def _pairs(figure: Ratio) -> np.ndarray:
    numerators, denominators = figure
    if len(numerators) != len(denominators):
        raise DataError(
            f"{len(numerators)} numerators for {len(denominators)} denominators; give one each a prompt"
        )
    pairs_N2 = np.array([numerators, denominators], dtype=float).T.reshape(-1, 2)
    return pairs_N2[pairs_N2[:, 1] > 0]
