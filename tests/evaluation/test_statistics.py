import math

import numpy as np
import pytest

from longtrain.evaluation.analysis.acceptance import ACCEPTANCE
from longtrain.evaluation.analysis.numbers import scale_of
from longtrain.evaluation.analysis.statistics import (
    LEAST,
    Bootstrap,
    mean_of_ratios,
    paired_difference,
    paired_mean_difference,
    paired_mean_quotient,
    pooled_ratio,
    wilson,
)


def test_wilson_matches_published_values():
    # R: prop.test(correct=FALSE) / binom::binom.confint(x, n, methods="wilson")
    got = wilson(15, 50)
    assert (round(got.low, 4), round(got.high, 4)) == (0.1910, 0.4375)
    assert (round(wilson(0, 10).high, 4), wilson(0, 10).low) == (0.2775, 0.0)
    assert (round(wilson(10, 10).low, 4), wilson(10, 10).high) == (0.7225, 1.0)


def test_wilson_of_nothing():
    assert math.isnan(wilson(0, 0).value)
    assert wilson(0, 0).to_json() == {"value": None, "low": None, "high": None, "n": 0}


def test_pooled_ratio_is_pooled_not_a_mean_of_means():
    got = pooled_ratio(([1, 90], [1, 10]))
    assert got.value == pytest.approx(91 / 11)
    assert got.n == 2


def test_pooled_ratio_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        cycles = rng.integers(10, 30, size=60)
        tokens = rng.binomial(cycles, 0.4) + cycles
        got = pooled_ratio((tokens, cycles), Bootstrap(trial, 400))
        hits += got.low <= 1.4 <= got.high
    assert 178 <= hits <= 200


def test_pooled_ratio_is_deterministic_and_ignores_empty_prompts():
    full = pooled_ratio(([3, 5, 8], [2, 2, 3]), Bootstrap(4))
    assert pooled_ratio(([3, 5, 8], [2, 2, 3]), Bootstrap(4)) == full
    assert pooled_ratio(([3, 5, 0, 8], [2, 2, 0, 3]), Bootstrap(4)) == full
    assert math.isnan(pooled_ratio(([0], [0])).value)


def test_paired_difference_is_tighter_than_unpaired():
    rng = np.random.default_rng(1)
    level = rng.normal(3.0, 0.8, size=80)
    ones = np.full(80, 20.0)
    better, worse = level * 20 + 3, level * 20
    got = paired_difference((better, ones), (worse, ones))
    assert got.value == pytest.approx(0.15)
    assert got.high - got.low < 0.01
    alone = pooled_ratio((better, ones))
    assert alone.high - alone.low > 0.2


def test_an_average_weighs_tasks_alike_and_is_resampled_within_them():
    rng = np.random.default_rng(2)
    small, large = rng.normal(20, 1, 10), rng.normal(60, 1, 1000)
    got = mean_of_ratios([(small, np.ones(10)), (large, np.ones(1000))])
    assert got.value == pytest.approx((small.mean() + large.mean()) / 2)
    assert got.n == 1010
    # were examples drawn from both tasks together, the interval would have the width of their distance
    assert got.high - got.low < 1.5


def test_a_mean_over_one_task_is_its_pooled_ratio():
    rng = np.random.default_rng(5)
    figure = rng.integers(2, 9, size=200), rng.integers(1, 4, size=200)
    one, pooled = (
        mean_of_ratios([figure], Bootstrap(resamples=4000)),
        pooled_ratio(figure, Bootstrap(resamples=4000)),
    )
    assert one.value == pytest.approx(pooled.value)
    assert one.low == pytest.approx(pooled.low, abs=0.05)
    assert one.high == pytest.approx(pooled.high, abs=0.05)


def test_perplexity_is_exp_of_the_pooled_ratio_and_its_interval_too():
    rng = np.random.default_rng(6)
    tokens = rng.integers(5, 12, size=9)
    nats = tokens * rng.normal(2, 0.3, size=9)
    got = mean_of_ratios([(nats, tokens)], of=np.exp)
    plain = mean_of_ratios([(nats, tokens)])
    assert got.value == pytest.approx(math.exp(nats.sum() / tokens.sum()))
    assert (got.low, got.high) == pytest.approx((math.exp(plain.low), math.exp(plain.high)), rel=1e-3)


def test_nothing_to_average():
    assert math.isnan(mean_of_ratios([]).value)
    assert math.isnan(mean_of_ratios([([], [])]).value)
    assert mean_of_ratios([([1], [0]), ([4], [2])]).value == 2
    assert math.isnan(paired_mean_difference([(([], []), ([], []))]).value)


def normal(rng, n):
    return rng.normal(0, 4, size=n)


def flips(rng, n):
    return rng.choice([-100.0, 0.0, 100.0], p=[0.15, 0.7, 0.15], size=n)


@pytest.mark.corners
@pytest.mark.parametrize("noise", [normal, flips])
@pytest.mark.parametrize(
    "rows",
    [
        [40, 40],
        [1] * 16,
        [2] * 16,
        [3] * 16,
        [6] * 16,
        [1] * 6,
        [6],
        [2] * 3,
        [4] + [40] * 5,
        [1, 2, 3, 4, 5],
    ],
    ids=str,
)
def test_a_pure_null_is_called_larger_than_noise_about_as_often_as_it_says(rows, noise):
    rng = np.random.default_rng(3)
    hits, called = 0, 0
    for trial in range(200):
        strata = []
        for count in rows:
            level, ones = rng.normal(50, 20, size=count), np.ones(count)
            strata.append(((level + noise(rng, count), ones), (level, ones)))
        got = paired_mean_difference(strata, Bootstrap(trial, 400))
        hits += got.low <= 0 <= got.high
        called += got.larger_than_noise
    assert called <= 20
    assert hits == 200 - called


def test_an_effect_is_found_in_small_tasks_too():
    rng = np.random.default_rng(4)
    found = 0
    for trial in range(50):
        strata = []
        for _ in range(16):
            level, ones = rng.normal(50, 20, size=3), np.ones(3)
            strata.append(((level + rng.normal(3, 4, size=3), ones), (level, ones)))
        found += paired_mean_difference(strata, Bootstrap(trial, 400)).larger_than_noise
    assert found >= 45


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_the_mean_of_small_tasks_has_an_interval_that_covers_it(count):
    rng = np.random.default_rng(7)
    levels, hits, widths = rng.uniform(20, 80, size=16), 0, []
    for trial in range(200):
        strata = [(rng.normal(level, 10, size=count), np.ones(count)) for level in levels]
        got = mean_of_ratios(strata, Bootstrap(trial, 400))
        hits += got.low <= levels.mean() <= got.high
        widths.append(got.high - got.low)
    assert hits >= 180
    exact = 2 * 1.96 * 10 / math.sqrt(16 * count)
    assert np.mean(widths) > 0.9 * exact
    if count > 1:  # tasks of one example cannot tell their spread from that of their levels
        assert np.mean(widths) < 1.2 * exact


def test_a_lone_example_borrows_the_spread_of_the_widest_task():
    rng = np.random.default_rng(8)
    calm, wide = rng.normal(0, 1, size=30), rng.normal(0, 9, size=30)
    ones, zeros = np.ones(30), np.zeros(30)

    def gap(*tasks):
        return paired_mean_difference(
            [((t, ones[: len(t)]), (zeros[: len(t)], ones[: len(t)])) for t in tasks]
        )

    alone = gap(calm, wide)
    with_one = gap(calm, wide, np.array([0.0]))
    assert with_one.high - with_one.low > 3 * (alone.high - alone.low)


def test_one_example_or_a_few_that_agree_have_a_value_and_no_interval():
    def mean(*scores):
        return mean_of_ratios([(scores, [1.0] * len(scores))])

    for got in (mean(10.0), mean(10.0, 10.0), pooled_ratio(([10.0], [1])), pooled_ratio(([9, 9], [3, 3]))):
        assert got.value in (10, 3) and math.isnan(got.low) and math.isnan(got.high)
        assert got.to_json()["low"] is None and "[" not in str(got) and not got.larger_than_noise
    assert math.isnan(paired_difference(([9.0], [1]), ([4.0], [1])).low)
    assert mean(10.0, 12.0).low < 10 < 12 < mean(10.0, 12.0).high
    assert mean(*[10.0] * LEAST).low == 10


def test_an_interval_stays_within_what_can_be():
    few = ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0], [1.0] * 7)
    assert mean_of_ratios([few]).high > 1
    got = mean_of_ratios([few], bounds=(0.0, 1.0))
    assert got.high == 1 and 0 <= got.low < got.value
    assert mean_of_ratios([([2.0], [1.0])], bounds=(0.0, 1.0)).value == 2


def test_two_examples_have_the_interval_of_students_law_with_one_degree_of_freedom():
    got = mean_of_ratios([([10.0, 12.0], [1.0, 1.0])], Bootstrap(resamples=4000))
    # draws of two are 10, 11 or 12, stretched by sqrt(2) and by 12.706 / 1.960
    assert got.high - got.low == pytest.approx(2 * np.sqrt(2) * 12.706 / 1.960, rel=1e-3)


def test_a_prompt_counts_only_where_both_have_a_figure():
    got = paired_mean_difference([(([9, 7, 5], [1, 1, 0]), ([4, 0, 1], [1, 0, 1]))])
    assert (got.value, got.n) == (5, 1)


def test_few_examples_never_make_a_difference_larger_than_noise():
    def gap(n):
        return paired_mean_difference([(([9.0] * n, [1] * n), ([4.0] * n, [1] * n))])

    assert gap(LEAST).larger_than_noise
    assert not gap(LEAST - 1).larger_than_noise
    assert not paired_mean_difference([(([4.0] * 9, [1] * 9), ([4.0] * 9, [1] * 9))]).larger_than_noise


def test_a_difference_stays_within_what_two_scores_can_differ_by() -> None:
    rng = np.random.default_rng(0)
    worse = (rng.random(40) < 0.03).astype(float)
    pair = ((worse, np.ones(40)), (np.ones(40), np.ones(40)))
    free = paired_mean_difference([pair], Bootstrap(1))
    held = paired_mean_difference([pair], Bootstrap(1), bounds=(0.0, 1.0))
    assert free.low < -1 and held.low == -1 and held.value == free.value and held.high == free.high


def test_an_acceptance_length_is_at_least_one() -> None:
    records = [{"one": 1.0, "cycles": 4.0, "cycle_tokens": tokens} for tokens in (4.0, 8.0)]
    found = scale_of({"name": ACCEPTANCE, "maximum": None}).mean([records], Bootstrap())
    assert found.value == 1.5 and found.low == 1.0 and found.high > 2.0


def test_a_quotient_of_means_over_tasks_is_paired():
    """A constant factor has no spread, however much the prompts differ; the value is that of the means."""
    base = [([1.0, 4.0, 2.5, 9.0, 3.0, 7.0], [1, 2, 1, 3, 2, 1]), ([0.5, 8.0, 1.0], [1, 1, 4])]
    twice = [([2 * x for x in above], below) for above, below in base]
    found = paired_mean_quotient(list(zip(twice, base, strict=True)))
    assert (found.value, found.low, found.high, found.n) == (2.0, 2.0, 2.0, 9)
    other = [([3.0, 1.0, 2.0, 2.0, 5.0, 1.0], base[0][1]), ([1.0, 1.0, 1.0], base[1][1])]
    found = paired_mean_quotient(list(zip(other, base, strict=True)))
    assert found.value == pytest.approx((14 / 10 + 3 / 6) / (26.5 / 10 + 9.5 / 6))
    assert found.low < found.value < found.high
    assert found == paired_mean_quotient(list(zip(other, base, strict=True)))
    nothing = [([0.0, 0.0], [1, 1])]
    assert paired_mean_quotient([(base[1], ([0.0] * 3, [1] * 3))]).n == 0
    assert paired_mean_quotient([(nothing[0], ([1.0, 2.0], [1, 1]))]).value == 0.0
