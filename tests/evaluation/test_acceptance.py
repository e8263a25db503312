"""Figures of acceptance from cycles written by hand."""

from __future__ import annotations

import pytest

from longtrain import tables
from longtrain.decoding.stats import Cycle
from longtrain.evaluation.analysis.acceptance import acceptance_of, ends_of
from longtrain.evaluation.analysis.numbers import DRAFTED, metrics_of, numbers_of, repetition_notes
from longtrain.evaluation.analysis.statistics import USUAL, Bootstrap
from longtrain.evaluation.records import Record, Turn
from longtrain.evaluation.suites.acceptance import retention


def record(cycles, tokens) -> Record:
    turn = Turn("", tuple(tokens), "length", 8, 8.0)
    return Record("a", "8", "0", {}, 8, turns=(turn,), cycles=(tuple(cycles),))


def test_texts_that_repeat_themselves_are_told_apart():
    loop, fresh = [1, 2, 3, 4, 5, 6, 7, 8] * 2, list(range(16))
    records = [record([Cycle(1, 3, 3, 3, 4)], loop), record([Cycle(1, 3, 3, 0, 1)], fresh)]
    numbers = [numbers_of(one) for one in records]
    assert [one["repeated_tokens"] for one in numbers] == [8, 0]
    found = metrics_of(DRAFTED, numbers, USUAL)
    assert found["repeated"]["value"] == 8 / 32
    assert found["τ, not repetitive"]["value"] == 1.0 and found["τ, not repetitive"]["n"] == 1

    def notes(numbers):
        return repetition_notes([{"acceptance": {}, "metrics": metrics_of(DRAFTED, numbers, USUAL)}])

    assert notes(numbers)[0].startswith("25% of the text repeats") and "no answer" not in notes(numbers)[0]
    assert "and no answer is without it" in notes(numbers[:1])[0] and notes(numbers[1:]) == []
    caches = [{"acceptance": None, "metrics": {"repeated": {"value": share}}} for share in (0.3, 0.2)]
    assert "30% of the text repeats" in repetition_notes(caches)[0] and repetition_notes(caches[1:]) == []
    assert "flatters every cache" in repetition_notes(caches)[0]


def test_acceptance_at_the_beginning_and_the_end_of_long_answers():
    begin, middle, end = Cycle(49, 3, 3, 1, 2), Cycle(51, 3, 3, 3, 4), Cycle(55, 3, 3, 2, 3)
    assert ends_of([begin, middle, end], 105) == ([begin], [end])
    assert ends_of([begin, middle, end], 99) is None  # its first and last 50 tokens overlap
    long = record(
        [Cycle(1, 3, 3, 3, 4), middle, Cycle(90, 3, 3, 0, 1), Cycle(91, 9, 9, 9, 9, True)], range(100)
    )
    short = record([Cycle(1, 3, 3, 3, 4)], range(60))
    found = metrics_of(DRAFTED, [numbers_of(one) for one in (long, short)], USUAL)
    first, last = (found[f"τ, {where} 50 tokens"] for where in ("first", "last"))
    assert (first["value"], first["n"], last["value"], last["n"]) == (4.0, 1, (4 + 1) / 2, 1)
    assert "τ, first 50 tokens" not in metrics_of(DRAFTED, [numbers_of(short)], USUAL)


def test_retention_is_of_drafts_alone():
    short = [record([Cycle(1, 3, 3, 3, 4), Cycle(5, 3, 3, 1, 2)], [1])]
    long = [record([Cycle(1, 3, 3, 1, 2)], [1])]
    assert retention(short, long)["retention"] == pytest.approx((2 - 1) / (3 - 1))
    assert retention([], long) == {} and retention(long, [record([], [1])]) == {}


def test_acceptance_of_any_rows():
    chain = [Cycle(1, 3, 3, 3, 4), Cycle(5, 3, 3, 0, 1), Cycle(6, 3, 3, 2, 2, ended=True)]
    tree = [Cycle(1, 2, 8, 2, 3), Cycle(4, 2, 8, 1, 2)]
    found = acceptance_of([chain, tree], Bootstrap(resamples=50), edges=(1, 4, 8))
    assert found["tau"]["value"] == pytest.approx((4 + 1 + 3 + 2) / 4) and found["cycles"] == 4
    assert found["acceptance_rate"]["value"] == pytest.approx((3 + 0 + 2 + 1) / (3 + 3 + 2 + 2))
    assert found["node_rate"]["value"] == pytest.approx((3 + 0 + 2 + 1) / (3 + 3 + 8 + 8))
    assert [(d["accepted"], d["tried"]) for d in found["by_depth"]] == [(3, 4), (2, 3), (1, 1)]
    assert [(p["from"], p["below"]) for p in found["by_position"]] == [(1, 4), (4, 8)]
    assert [p["tau"]["value"] for p in found["by_position"]] == pytest.approx([3.5, 1.5])
    assert acceptance_of([chain, tree], Bootstrap(resamples=50))["by_position"][-1]["below"] == 8
    nothing = acceptance_of([], Bootstrap(resamples=50))
    assert nothing["tau"]["value"] is None and nothing["by_position"] == [] and nothing["by_depth"] == []


@pytest.mark.parametrize(("count", "text"), [(512, "512"), (1024, "1k"), (1536, "1.5k"), (1025, "1025")])
def test_token_counts_print_short(count, text):
    assert tables.tokens(count) == text
