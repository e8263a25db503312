import math

import numpy as np
import pytest

from longtrain.errors import DataError
from longtrain.evaluation.statistics import Interval, paired_difference, pooled_ratio, wilson


def test_wilson_matches_published_values():
    # R: prop.test(correct=FALSE) / binom::binom.confint(x, n, methods="wilson")
    got = wilson(15, 50)
    assert (round(got.low, 4), round(got.high, 4)) == (0.1910, 0.4375)
    assert (round(wilson(0, 10).high, 4), wilson(0, 10).low) == (0.2775, 0.0)
    assert (round(wilson(10, 10).low, 4), wilson(10, 10).high) == (0.7225, 1.0)


def test_wilson_of_nothing_and_of_nonsense():
    assert math.isnan(wilson(0, 0).value)
    assert wilson(0, 0).to_json() == {"value": None, "low": None, "high": None, "n": 0}
    with pytest.raises(DataError, match="successes=3"):
        wilson(3, 2)


def test_pooled_ratio_is_pooled_not_a_mean_of_means():
    got = pooled_ratio([1, 90], [1, 10])
    assert got.value == pytest.approx(91 / 11)
    assert got.n == 2


def test_pooled_ratio_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        cycles = rng.integers(10, 30, size=60)
        tokens = rng.binomial(cycles, 0.4) + cycles
        got = pooled_ratio(tokens, cycles, seed=trial, resamples=400)
        hits += got.low <= 1.4 <= got.high
    assert 178 <= hits <= 200


def test_pooled_ratio_is_deterministic_and_ignores_empty_prompts():
    full = pooled_ratio([3, 5, 8], [2, 2, 3], seed=4)
    assert pooled_ratio([3, 5, 8], [2, 2, 3], seed=4) == full
    assert pooled_ratio([3, 5, 0, 8], [2, 2, 0, 3], seed=4) == full
    assert math.isnan(pooled_ratio([0], [0]).value)


def test_paired_difference_is_tighter_than_unpaired():
    rng = np.random.default_rng(1)
    level = rng.normal(3.0, 0.8, size=80)
    ones = np.full(80, 20.0)
    better, worse = level * 20 + 3, level * 20
    got = paired_difference((better, ones), (worse, ones))
    assert got.value == pytest.approx(0.15)
    assert got.high - got.low < 0.01
    alone = pooled_ratio(better, ones)
    assert alone.high - alone.low > 0.2


def test_paired_difference_refuses_other_prompts():
    with pytest.raises(DataError, match="same prompts"):
        paired_difference(([1, 2], [1, 1]), ([1], [1]))


def test_interval_prints_itself():
    assert str(Interval(1.5, 1.25, 1.75, 9)) == "1.500 [1.250, 1.750]"
