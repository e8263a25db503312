"""The figures, and that the end of a text does not bias them."""

from __future__ import annotations

import random
from math import isnan

import pytest

from longtrain.decoding.output import Emitted, Ending, Output
from longtrain.decoding.roles import TreeShape
from longtrain.decoding.stats import Cycle, Stats, repeated, tau

TREE = TreeShape((2, 4))


def run(lengths: list[int], limit: int, shape: TreeShape, **ending) -> Output:
    """One sequence whose cycles emit so many tokens, numbered on; stops at `limit`."""
    out = Output(Ending(limit, **ending), 1)
    out.begin([0])
    token = 1
    for n in lengths:
        if out.done:
            break
        out.take([Emitted(list(range(token, token + n)), n - 1)], shape)
        token += n
    return out


def test_figures_of_hand_made_cycles():
    out = run([3, 1, 2, 3], 9, TREE)
    assert out.tokens[0] == list(range(9)) and out.finish == ["length"]
    assert [c.emitted for c in out.cycles[0]] == [3, 1, 2, 2]
    stats = Stats(rows=out.cycles, output_tokens=[9], decode_s=2.0, prefill_s=1.0)
    assert stats.tau == (3 + 1 + 2 + 3) / 4  # the cut cycle counts whole
    assert stats.acceptance_rate == 5 / 8
    assert stats.by_depth() == [(3, 4), (2, 3)]
    assert (stats.cut, stats.ended, stats.decode_tokens) == (1, 0, 8)
    assert stats.tokens_per_s == 4.0 and stats.end_to_end_tokens_per_s == 3.0
    both = stats + stats
    assert both.tau == stats.tau and both.decode_tokens == 16 and both.tokens_per_s == 4.0


def test_a_cycle_cut_by_the_cache_accepted_its_drafts_but_gave_fewer_tokens():
    flags: list[bool] = []
    out = Output(Ending(9), 1, stream=lambda row, new, drafted: flags.extend(drafted))
    out.begin([0])
    shape = TreeShape((1, 1, 1, 1))
    out.take([Emitted([1, 2], 4)], shape)  # two rows were left before the flush; all four drafts are right
    out.take([Emitted([3, 4, 5], 2)], shape)
    stats = Stats(rows=out.cycles)
    assert [c.put_off for c in out.cycles[0]] == [3, 0] and stats.cut == 0
    assert stats.tau == 2.5 and stats.acceptance_rate == 6 / 8
    assert stats.by_depth() == [(2, 2), (2, 2), (1, 2), (1, 1)]
    assert flags == [False, True, True, True, True, False]


def test_a_cycle_that_the_text_ends_in_is_left_out():
    out = run([2, 3], 100, TREE, stop_ids=frozenset({4}))
    assert out.tokens[0] == [0, 1, 2, 3, 4] and out.finish == ["stop_id"]
    stats = Stats(rows=out.cycles)
    assert stats.ended == 1 and stats.tau == 2.0 and stats.decode_tokens == 4
    whole = Stats(rows=run([2, 3], 100, TREE, stop_ids=frozenset({5})).cycles)
    assert whole.ended == 0 and whole.tau == 2.5  # the end was the cycle's last token: nothing was cut


def test_the_cut_cycle_does_not_bias_tau():
    rng = random.Random(0)
    true = (1 + 2 + 3) / 3
    rows = [run([rng.choice((1, 2, 3)) for _ in range(20)], 8, TREE).cycles[0] for _ in range(20_000)]
    assert Stats(rows=rows).tau == pytest.approx(true, rel=0.006)
    assert tau(c for row in rows for c in row if not c.cut) < 0.97 * true  # dropping it would


def test_nothing_drafted_or_decoded_is_nan_not_a_crash():
    assert isnan(Stats().tau) and isnan(Stats().acceptance_rate) and isnan(Stats().tokens_per_s)
    plain = Stats(rows=[[Cycle(1, 0, 0, 0, 1)]])
    assert plain.tau == 1.0 and isnan(plain.acceptance_rate) and plain.by_depth() == []


def test_repeated_text_is_counted_by_token():
    text = list(range(20))
    assert repeated(text) == 0
    assert repeated(text + text[3:13]) == 10
    assert repeated(text + text[3:10]) == 0  # 7 tokens are no 8-gram
    assert repeated([1] * 20) == 19  # each 8-gram from the second on: tokens 1..19
    assert repeated(text + text[:8] + [99] + text[:8]) == 16
