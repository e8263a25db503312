from dataclasses import astuple
from itertools import pairwise

import pytest
import torch

from longtrain.data.config import DataConfig, PackingStage, SourceConfig
from longtrain.data.packing.batch import PADDING, batch_seed
from longtrain.data.packing.module import DataModule
from longtrain.errors import ConfigError, DataError

SOURCES = (SourceConfig("text", "x"),)


def config(*stages, **values):
    return DataConfig("made", SOURCES, stages=stages, **values)


def same(one, two):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(astuple(one), astuple(two), strict=True)
    )


@pytest.fixture
def data(make_prepared):
    lengths = [37, 90, 12, 55, 61, 8, 143, 29, 77, 31] * 6
    masks = [[i % 3 != 0 for i in range(n)] for n in lengths]
    return make_prepared(lengths, masks=masks, val=[4, 9], kinds=["book", "code"] * 30)


def test_a_batch_is_one_row_of_exactly_row_tokens(data):
    module = DataModule(data.folder, config(PackingStage(128, 64, steps=20)), seed=1)
    batches = list(module.train_dataloader())
    assert len(batches) == 20
    padded = 0
    for batch in batches:
        assert batch.ids_T.shape == batch.loss_mask_T.shape == (128,)
        assert batch.ids_T.dtype == torch.int64 and batch.loss_mask_T.dtype == torch.bool
        assert (
            batch.bounds[0] == 0
            and batch.bounds[-1] == 128
            and list(batch.bounds) == sorted(set(batch.bounds))
        )
        assert len(batch.names) == len(batch.kinds) == len(batch.bounds) - 1
        for begin, end, name, kind in zip(
            batch.bounds, batch.bounds[1:], batch.names, batch.kinds, strict=False
        ):
            assert not batch.loss_mask_T[begin]
            if name == PADDING:
                padded += 1
                assert end == 128 and not batch.loss_mask_T[begin:end].any()
                continue
            doc = int(name.removeprefix("doc"))
            first = int(batch.ids_T[begin])  # ids count up over all documents
            assert batch.ids_T[begin:end].tolist() == list(range(first, first + end - begin))
            assert data.start[doc] <= first and first + end - begin <= data.start[doc] + data.length[doc]
            assert batch.loss_mask_T[begin + 1 : end].tolist() == [
                bool(m) for m in data.mask[first + 1 : first + end - begin]
            ]
            assert kind == ("book", "code")[doc % 2]
    assert padded


@pytest.mark.parametrize("world,accumulate", [(1, 1), (3, 1), (2, 4)])
def test_ranks_share_the_plan_and_tokens_in_step_is_exact(data, world, accumulate):
    stages = (PackingStage(64, 64, steps=5), PackingStage(200, 100, steps=3))
    ranks = [
        list(
            DataModule(
                data.folder, config(*stages), accumulate=accumulate, seed=2, world=world, rank=rank
            ).train_dataloader()
        )
        for rank in range(world)
    ]
    alone = DataModule(data.folder, config(*stages), accumulate=accumulate * world, seed=2)
    assert all(len(batches) == 8 * accumulate for batches in ranks)
    joined = [batch for group in zip(*ranks, strict=True) for batch in group]
    assert all(same(a, b) for a, b in zip(joined, alone.train_dataloader(), strict=True))
    assert len({batch.seed for batch in joined}) == len(joined)
    for step in range(8):
        group = joined[step * world * accumulate : (step + 1) * world * accumulate]
        labels = sum(int(batch.loss_mask_T.sum()) for batch in group)
        assert {batch.tokens_in_step for batch in group} == {labels}
        documents = sum(
            bool(batch.loss_mask_T[a:b].any()) for batch in group for a, b in pairwise(batch.bounds)
        )
        assert {batch.documents_in_step for batch in group} == {documents}


@pytest.mark.parametrize("workers", [0, 1])
def test_resuming_gives_what_continuing_would(data, workers):
    stages = (PackingStage(64, 64, fraction=0.5), PackingStage(128, 128, fraction=0.5))
    made = {"accumulate": 2, "seed": 9, "total_steps": 10}
    whole = list(DataModule(data.folder, config(*stages), **made).train_dataloader())
    resumed = DataModule(data.folder, config(*stages, workers=workers), **made)
    resumed.start_batch = 2 * 3
    rest = list(resumed.train_dataloader())
    assert len(whole) == 20 and len(rest) == 14
    assert all(same(a, b) for a, b in zip(whole[6:], rest, strict=True))


def test_seeds_are_those_of_the_global_position():
    assert batch_seed(1, 2) == batch_seed(1, 2) != batch_seed(2, 1)
    assert all(0 <= batch_seed(7, i) < 2**63 for i in range(100))


def test_validation_has_the_held_out_documents_on_every_rank(data):
    loaders = [
        DataModule(data.folder, config(PackingStage(64, 64, steps=1)), world=2, rank=r).val_dataloader()
        for r in (0, 1)
    ]
    batches = [list(loader) for loader in loaders]
    assert len(batches[0]) == len(batches[1]) > 0
    names = {name for rank in batches for batch in rank for name in batch.names} - {PADDING}
    assert names <= {"doc4", "doc9"}


def test_no_held_out_data_gives_no_validation(make_prepared):
    module = DataModule(make_prepared([50] * 4).folder, config(PackingStage(64, 64, steps=1)))
    assert module.val_dataloader() == []


def test_pieces_longer_than_the_context_are_refused(data):
    with pytest.raises(ConfigError, match="context of 100 tokens"):
        DataModule(data.folder, config(PackingStage(512, 128, steps=1)), context_tokens=100)
    DataModule(data.folder, config(PackingStage(512, 100, steps=1)), context_tokens=100)


def test_a_missing_folder_says_what_to_run(tmp_path):
    with pytest.raises(DataError, match="longtrain prepare"):
        DataModule(tmp_path / "none", config(PackingStage(8, 8, steps=1)))


def test_batches_move_whole(data):
    batch = next(iter(DataModule(data.folder, config(PackingStage(64, 64, steps=1))).train_dataloader()))
    moved = batch.to("meta")
    assert moved.ids_T.device.type == moved.loss_mask_T.device.type == "meta" and moved.bounds == batch.bounds


def test_a_stage_that_would_cut_prompts_from_their_answers_is_told(data, caplog):
    values = {"labels": "last_answer", "long_documents": "truncate"}
    longest = int(data.length.max())
    with caplog.at_level("WARNING"):
        DataModule(data.folder, config(PackingStage(longest, longest, steps=1), **values))
        DataModule(data.folder, config(PackingStage(longest, longest - 1, steps=1)))
    assert not caplog.records
    with caplog.at_level("WARNING"):
        DataModule(data.folder, config(PackingStage(longest, longest - 1, steps=1), **values))
    assert f"doc_tokens={longest - 1}" in caplog.text


def test_a_stage_that_would_cut_documents_is_refused_where_they_must_be_whole(data):
    longest = int(data.length.max())
    name = data.names[int(data.length.argmax())]
    DataModule(data.folder, config(PackingStage(longest, longest, steps=1))).refuse_cuts()
    cut = DataModule(
        data.folder,
        config(PackingStage(longest, longest, steps=1), PackingStage(longest, longest - 1, steps=1)),
    )
    with pytest.raises(ConfigError, match=rf"cut document {name} of {longest} tokens.* to {longest} or more"):
        cut.refuse_cuts()
