"""What one of two ranks does for test_sharded.py: each check holds a sharded target against a whole one.

The ranks work on unlike rows, ask for unlike passes, and write down what became of each check.
Run by torch.multiprocessing; the process group is gloo on the CPU.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from longtrain.data.rows.batch import Batch
from longtrain.decoding.engine import Engine
from longtrain.errors import ConflictError, TrainingError
from longtrain.methods.longspec.config import Config as LongSpecConfig
from longtrain.methods.longspec.spec import SPEC as LONGSPEC
from longtrain.methods.lookaheadkv.config import Config as LookaheadConfig
from longtrain.methods.lookaheadkv.spec import SPEC as LOOKAHEAD
from longtrain.targets.loading import load_target
from longtrain.targets.step import Want

WORLD = 2


def row(rank, pairs, seed=3):
    """A packed row of (prompt, labels) lengths, another one on each rank."""
    gen = torch.Generator().manual_seed(17 * seed + rank)
    bounds = [0]
    for pair in pairs:
        bounds.append(bounds[-1] + sum(pair))
    ids = torch.randint(2, 97, (bounds[-1],), generator=gen)
    learn = torch.zeros(bounds[-1], dtype=torch.bool)
    for (prompt, labels), start in zip(pairs, bounds, strict=False):
        learn[start + prompt : start + prompt + labels] = True
    documents = sum(labels > 0 for _, labels in pairs)
    return Batch(
        ids,
        tuple(bounds),
        learn,
        seed=seed,
        tokens_in_step=int(learn.sum()),
        documents_in_step=documents,
    )


def positions(batch):
    return torch.cat([torch.arange(b - a) for a, b in zip(batch.bounds, batch.bounds[1:], strict=False)])


def nothing_gathered(target):
    """Every layer's weights are this rank's part again, and the others' memory is free."""
    shards = target.shards
    assert not shards._here and not shards._coming
    held = sum(p.to_local().untyped_storage().nbytes() for p in target.model.model.layers.parameters())
    whole = sum(p.numel() * p.element_size() for p in target.model.model.layers.parameters())
    assert held <= 0.6 * whole  # halves, rounded up to whole rows
    assert not list(target.parameters())


def packed_outputs(rank, whole, sharded):
    batch = row(rank, [(5, 9), (20 + 8 * rank, 4), (1, 2)])
    want = Want("none", hidden=(0, 2, -1), kv=(1, 2))
    args = (batch.ids_T, positions(batch), batch.bounds, want)
    with torch.no_grad():
        mine, theirs = whole.packed(*args), sharded.packed(*args)
    for layer in want.hidden:
        assert torch.equal(mine.hidden[layer], theirs.hidden[layer]), layer
    for layer in want.kv:
        assert all(torch.equal(a, b) for a, b in zip(mine.kv[layer], theirs.kv[layer], strict=True))
    logits = [target.head(mine.hidden[-1]) for target in (whole, sharded)]
    assert torch.equal(*logits)
    nothing_gathered(sharded)
    assert sharded.shards.seconds_waited() > 0 and sharded.shards.seconds_waited() == 0


def early_exits(rank, whole, sharded):
    """One rank leaves at the first layer and the other at the last, each with a watch."""
    batch, stop = row(rank, [(12, 5)]), 2 * rank
    want = Want("none", stop_at_layer=stop, kv=(stop,))
    mine, theirs = [], []
    with torch.no_grad():
        for target, seen in ((whole, mine), (sharded, theirs)):
            watch = lambda *of_layer, to=seen: to.append(of_layer)  # noqa: E731
            target.packed(batch.ids_T, positions(batch), batch.bounds, want, watch=watch)
    assert [one[0] for one in mine] == [one[0] for one in theirs] == list(range(stop + 1))
    for a, b in zip(mine, theirs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))
    nothing_gathered(sharded)


def weights_and_identity(rank, whole, sharded):
    assert sharded.info == whole.info
    for layer in range(whole.info.n_layers):
        mine, theirs = whole.layer_state(layer), sharded.layer_state(layer)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert torch.equal(whole.head_weight, sharded.head_weight)
    assert torch.equal(whole.final_norm_weight, sharded.final_norm_weight)
    for change in ({}, {"weights": "random", "seed": 5}):
        one, split = (load_target("tiny", shard=shard, **change) for shard in (None, "fsdp2"))
        assert one.info == split.info
        assert ("(random weights)" in one.info.name) == bool(change)
    assert torch.equal(one.layer_state(3)["mlp.up_proj.weight"], split.layer_state(3)["mlp.up_proj.weight"])


def gradients(spec, config, target, batches):
    """Two steps' losses and gradients; ranks settle after each, as the training job has them do."""
    torch.manual_seed(7)
    module = spec.build(config, target.info)
    objective = spec.objective(module, target, config).train()
    objective.register_forward_hook(lambda *_: target.settle())
    totals = []
    for batch in batches:
        loss = objective(batch)
        loss.total.backward()
        totals.append(loss.total.detach())
        totals += [number for pair in loss.figures.values() for number in pair]
    return totals, {name: value.grad for name, value in module.named_parameters()}


def same_gradients(spec, config, whole, sharded, batches):
    mine, want = gradients(spec, config, whole, batches)
    theirs, got = gradients(spec, config, sharded, batches)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert want.keys() == got.keys() and any(value.any() for value in want.values())
    assert all(torch.equal(want[name], got[name]) for name in want)
    nothing_gathered(sharded)


def longspec(rank, whole, sharded):
    """Warm start, chunks of one rank only, and a guard (two more passes) in a row of one rank only."""
    config = LongSpecConfig(window=12, chunk_tokens=16, anchor_offset=True, guard_every=2, warm_start=True)
    batches = [row(rank, [(1, 40 * rank + 3), (8, 6)], seed=4 + rank), row(rank, [(9, 30)], seed=5 + rank)]
    same_gradients(LONGSPEC, config, whole, sharded, batches)


def lookaheadkv(rank, whole, sharded):
    """Backward goes through the layers; in the second row of rank 1 there is nothing to learn."""
    config = LookaheadConfig(n_lookahead=5, lora_rank=3)
    batches = [row(rank, [(17, 4), (9, 0), (20, 3 + rank)]), row(rank, [(30, 0 if rank else 7)])]
    same_gradients(LOOKAHEAD, config, whole, sharded, batches)


def answers(rank, whole, sharded):
    """Rank 0 alone writes; the other helps until it has settled."""
    if rank == 0:
        prompts = [[5, 9, 11, 40, 3], [7, 8]]
        texts = [
            Engine(target).generate(prompts, max_new_tokens=6, ignore_eos=True).tokens
            for target in (whole, sharded)
        ]
        assert texts[0] == texts[1]
    sharded.settle()
    nothing_gathered(sharded)


def refused(rank, whole, sharded):
    for call in (sharded.fuse, lambda: sharded.model.model.layers[0](torch.zeros(1, 1, 48))):
        try:
            call()
        except ConflictError as error:
            assert "shard" in str(error)
        else:
            raise AssertionError("it was allowed")


def another_rank_ends(rank, whole, sharded):
    if rank == 1:
        return
    try:
        sharded.settle()
    except TrainingError as error:
        assert "another rank that shares the target ended" in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("it went unnoticed")


CHECKS = (
    packed_outputs,
    early_exits,
    weights_and_identity,
    longspec,
    lookaheadkv,
    answers,
    refused,
    another_rank_ends,
)


def main(rank, folder):
    torch.set_num_threads(1)
    folder = Path(folder)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    found = {}
    try:
        whole, sharded = (load_target(folder / "model", shard=shard) for shard in (None, "fsdp2"))
        for check in CHECKS:
            found[check.__name__] = ""
            try:
                check(rank, whole, sharded)
            except Exception:
                found[check.__name__] = traceback.format_exc()
                break  # the ranks are no longer in step
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # as a rank that dies: no farewell
