"""Stages with weights of their own: raw text first, the target's answers last."""

import numpy as np
import pytest

from longtrain.data.config import DataConfig, PackingStage, SourceConfig
from longtrain.data.packing.mixture import MixtureSequences
from longtrain.data.packing.module import DataModule
from longtrain.data.packing.pack import plan_run
from longtrain.errors import ConfigError, DataError
from tests.data.test_module import same

TEXT_FIRST = (
    PackingStage(128, 64, fraction=0.7, weights={"chat": 0}),
    PackingStage(128, 128, fraction=0.3, weights={"chat": 3}),
)


@pytest.fixture
def data(make_prepared):
    lengths = [37, 90, 12, 55, 61, 8, 143, 29, 77, 31] * 6
    return make_prepared(lengths, val=[4, 9], kinds=["book", "chat"] * 30)


def config(stages=TEXT_FIRST):
    return DataConfig("made", (SourceConfig("text", "x"),), stages=stages)


def tokens_of(data, plan, kind, rows):
    pieces = [plan.row(row) for row in rows]
    return sum(int(one.length[data.kind[one.doc] == data.kinds.index(kind)].sum()) for one in pieces)


def test_each_stage_has_its_own_mixture(data):
    plan = plan_run(data, TEXT_FIRST, sequences_per_step=2, seed=0, total_steps=100)
    assert plan.stage_steps == (70, 30)
    first, last = range(140), range(140, 200)
    assert tokens_of(data, plan, "chat", first) == 0 < tokens_of(data, plan, "book", first)
    books, chats = (tokens_of(data, plan, kind, last) for kind in ("book", "chat"))
    sizes = {kind: data.length[(data.kind == n) & ~data.val].sum() for n, kind in enumerate(data.kinds)}
    wanted = 3 * sizes["chat"] / sizes["book"]
    assert chats / books == pytest.approx(wanted, rel=0.15)


def test_kinds_without_a_weight_keep_their_sources(make_prepared):
    data = make_prepared([100] * 40, kinds=["book", "chat"] * 20, sources=[0, 1] * 20, weights=[1.0, 2.0])
    plan = plan_run(
        data, [PackingStage(100, 100, epochs=1, weights={"book": 3})], sequences_per_step=1, seed=0
    )
    passes = np.bincount(plan.pieces.doc, minlength=40)
    assert passes[0::2].tolist() == [3] * 20 and passes[1::2].tolist() == [2] * 20


def test_a_run_resumed_in_either_stage_goes_on_with_the_same_batches(data):
    whole = list(DataModule(data.folder, config(), seed=1, total_steps=20, accumulate=2).train_dataloader())
    for start in (6, 14, 15, 33):
        rest = DataModule(data.folder, config(), seed=1, total_steps=20, accumulate=2)
        rest.start_batch = start
        assert all(same(a, b) for a, b in zip(rest.train_dataloader(), whole[start:], strict=True))


def test_ranks_see_together_what_one_sees(data):
    one = list(DataModule(data.folder, config(), seed=1, total_steps=20, accumulate=2).train_dataloader())
    ranks = [
        list(DataModule(data.folder, config(), seed=1, total_steps=20, world=2, rank=r).train_dataloader())
        for r in range(2)
    ]
    together = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert all(same(a, b) for a, b in zip(one, together, strict=True))


def test_without_weights_the_plan_is_as_before(data):
    plain, given = (
        plan_run(data, [PackingStage(128, 64, steps=30, weights=weights)], sequences_per_step=1, seed=2)
        for weights in ({}, {"book": 1, "chat": 1})
    )
    assert np.array_equal(plain.pieces.start, given.pieces.start)


def test_a_stage_in_which_nothing_is_left_is_refused(data):
    stages = [PackingStage(128, 64, steps=30, weights={"book": 0, "chat": 0})]
    with pytest.raises(DataError, match=r"no training document of 2 tokens or more .* a weight above 0"):
        plan_run(data, stages, sequences_per_step=1, seed=2)


def test_a_kind_that_no_source_has_is_refused_before_anything_is_read():
    values = {
        "name": "mine",
        "sources": [{"text": "x", "kind": "book"}],
        "stages": [{"steps": 1, "sequence_tokens": 8, "doc_tokens": 8, "weights": {"boks": 1}}],
    }
    with pytest.raises(
        ConfigError, match=r"data\.stages\.weights=boks; allowed: kinds of data\.sources: book"
    ):
        DataConfig.parse(values)
    values["stages"][0]["weights"] = {"book": -1}
    with pytest.raises(ConfigError, match=r"data\.stages\.weights"):
        DataConfig.parse(values)


def test_a_mixture_of_tasks_has_no_weights_of_kinds():
    with pytest.raises(ConfigError, match=r"drawn by data\.shares"):
        MixtureSequences(None, TEXT_FIRST, total_steps=10)
