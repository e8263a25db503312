import time

import numpy as np
import pytest

from longtrain.data.config import PackingStage
from longtrain.data.packing.pack import best_fit, count_labels, plan_run, plan_val, stage_steps
from longtrain.errors import ConfigError, DataError


def lengths_like_a_corpus(n, seed=0):
    return np.maximum(4, np.random.default_rng(seed).lognormal(4.5, 1.0, n).astype(int)).tolist()


def covered(data, plan, rows):
    count = np.zeros(len(data.ids), int)
    for i in rows:
        row = plan.row(i)
        for start, length in zip(row.start, row.length, strict=True):
            count[start : start + length] += 1
    return count


@pytest.mark.parametrize("sequence_tokens,doc_tokens", [(256, 256), (1024, 100), (777, 333), (128, 2)])
def test_rows_hold_whole_pieces_and_an_epoch_covers_every_token_once(
    make_prepared, sequence_tokens, doc_tokens
):
    data = make_prepared(lengths_like_a_corpus(150))
    plan = plan_run(data, [PackingStage(sequence_tokens, doc_tokens, epochs=1)], sequences_per_step=1, seed=3)
    assert plan.pieces.length.max() <= doc_tokens and plan.pieces.length.min() >= 2
    for i in range(plan.n_rows):
        row = plan.row(i)
        assert row.length.sum() <= sequence_tokens
        assert (
            (row.start >= data.start[row.doc])
            & (row.start + row.length <= data.start[row.doc] + data.length[row.doc])
        ).all()
    count = covered(data, plan, range(plan.n_rows))
    lost = int((data.length % doc_tokens == 1).sum())  # a tail of one token cannot hold a label
    assert count.max() == 1 and (count == 0).sum() == lost


def test_rows_are_well_filled(make_prepared):
    data = make_prepared(lengths_like_a_corpus(3000))
    assert plan_run(data, [PackingStage(1024, 1024, epochs=1)], sequences_per_step=1, seed=0).fill > 0.98


def test_the_plan_is_a_function_of_its_inputs(make_prepared):
    data = make_prepared(lengths_like_a_corpus(100))
    stages = [PackingStage(300, 200, steps=7), PackingStage(500, 500, steps=5)]
    one, two, other = (plan_run(data, stages, sequences_per_step=4, seed=s) for s in (1, 1, 2))
    for key in ("start", "length", "doc", "labels"):
        assert np.array_equal(getattr(one.pieces, key), getattr(two.pieces, key))
    assert not np.array_equal(one.pieces.start[:20], other.pieces.start[:20])
    assert one.stage_steps == (7, 5) and one.n_rows == 48
    assert one.sequence_tokens.tolist() == [300] * 28 + [500] * 20


def test_a_longer_run_begins_like_a_shorter_one(make_prepared):
    data = make_prepared(lengths_like_a_corpus(60))
    short, long = (
        plan_run(data, [PackingStage(256, 256, steps=n)], sequences_per_step=2, seed=5) for n in (10, 90)
    )
    assert np.array_equal(long.pieces.start[: len(short.pieces.start)], short.pieces.start)


def test_later_epochs_are_cut_and_ordered_anew(make_prepared):
    data = make_prepared([1000])
    plan = plan_run(data, [PackingStage(100, 100, steps=40)], sequences_per_step=1, seed=0)
    first, second = plan.pieces.start[:10], plan.pieces.start[10:21]
    assert sorted(first.tolist()) == list(range(0, 1000, 100))
    assert sorted(second.tolist()) != sorted(first.tolist())


def test_epochs_give_whole_steps_and_at_least_one(make_prepared):
    data = make_prepared([100] * 10)
    plan = plan_run(data, [PackingStage(100, 100, epochs=2)], sequences_per_step=3, seed=0)
    assert plan.n_steps == 6  # 20 rows, the last 2 left out
    assert plan_run(data, [PackingStage(100, 100, epochs=0.1)], sequences_per_step=25, seed=0).n_steps == 1


def test_fractions_share_the_run_exactly():
    stages = [PackingStage(8, 8, fraction=f) for f in (0.3, 0.3, 0.4)]
    for total in (1, 7, 10, 101):
        assert sum(stage_steps(stages, total)) == total
    with pytest.raises(ConfigError, match=r"trainer\.max_steps"):
        stage_steps(stages, None)
    with pytest.raises(ConfigError, match="empty"):
        stage_steps([], 5)


def test_the_run_is_not_longer_than_asked(make_prepared):
    data = make_prepared([50] * 40)
    plan = plan_run(
        data,
        [PackingStage(50, 50, steps=6), PackingStage(50, 50, epochs=9)],
        sequences_per_step=2,
        seed=0,
        total_steps=8,
    )
    assert plan.stage_steps == (6, 2)


def test_weights_are_passes_over_a_source(make_prepared):
    data = make_prepared([10] * 400, sources=[0] * 200 + [1] * 200, weights=[2.0, 0.5])
    plan = plan_run(data, [PackingStage(10, 10, epochs=1)], sequences_per_step=1, seed=0)
    per_doc = np.bincount(plan.pieces.doc, minlength=400)
    assert (per_doc[:200] == 2).all()
    assert per_doc[200:].max() == 1 and 70 <= per_doc[200:].sum() <= 130


def test_labels_of_pieces_do_not_count_their_first_token():
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2, 500).astype(np.uint8)
    start = rng.integers(0, 490, 200)
    length = np.minimum(rng.integers(2, 60, 200), 500 - start)
    length[0], start[0] = 2, 498
    length[1], start[1] = 10, 490
    wanted = [mask[s + 1 : s + n].sum() for s, n in zip(start, length, strict=True)]
    assert count_labels(mask, start, length).tolist() == wanted


def test_pieces_without_labels_and_held_out_documents_are_left_out(make_prepared):
    masks = [np.zeros(30), np.ones(30), np.r_[np.zeros(20), np.ones(10)], np.ones(30)]
    data = make_prepared([30] * 4, masks=masks, val=[3])
    plan = plan_run(data, [PackingStage(10, 10, epochs=1)], sequences_per_step=1, seed=0)
    assert sorted(set(plan.pieces.doc.tolist())) == [1, 2]
    assert plan.pieces.start[plan.pieces.doc == 2].tolist() == [80]
    assert plan.tokens_in_step.tolist() == [9] * 4


@pytest.mark.parametrize("lengths,masks,val", [([20], [np.zeros(20)], ()), ([20], None, [0])])
def test_nothing_to_train_on_is_an_error(make_prepared, lengths, masks, val):
    data = make_prepared(lengths, masks=masks, val=val)
    with pytest.raises(DataError, match="no training document"):
        plan_run(data, [PackingStage(10, 10, steps=1)], sequences_per_step=1, seed=0)


def test_validation_rows_are_the_held_out_documents(make_prepared):
    data = make_prepared([40] * 20, val=[3, 5, 6, 7])
    plan = plan_val(data, PackingStage(80, 40, steps=1), max_rows=10)
    assert plan.n_rows == 2 and sorted(plan.pieces.doc.tolist()) == [3, 5, 6, 7]
    assert plan_val(data, PackingStage(80, 40, steps=1), max_rows=1).n_rows == 1


def test_best_fit_takes_the_tightest_space():
    groups = best_fit(np.array([6, 5, 4, 3, 2]), 10)
    assert sorted(sorted(g.tolist()) for g in groups) == [[0, 2], [1, 3, 4]]


def test_a_hundred_thousand_pieces_plan_in_seconds(make_prepared):
    data = make_prepared([50] * 20000)
    begin = time.perf_counter()
    plan = plan_run(data, [PackingStage(1000, 50, epochs=5)], sequences_per_step=8, seed=0)
    assert plan.fill > 0.99 and time.perf_counter() - begin < 10


@pytest.mark.parametrize("recut", [True, False])
def test_epochs_cut_long_documents_anew_unless_told_otherwise(make_prepared, recut):
    data = make_prepared([500, 40, 333])
    stage = PackingStage(128, 100, epochs=3, recut=recut)
    plan = plan_run(data, [stage], sequences_per_step=1, seed=3)
    pieces = set(zip(plan.pieces.start.tolist(), plan.pieces.length.tolist(), strict=True))
    first = plan_run(data, [PackingStage(128, 100, epochs=1)], sequences_per_step=1, seed=3).pieces
    once = set(zip(first.start.tolist(), first.length.tolist(), strict=True))
    assert once <= pieces and (pieces == once) != recut
