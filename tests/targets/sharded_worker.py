"""What one of two ranks does for test_sharded.py: each check holds a sharded target against a whole one.

The ranks work on unlike rows, ask for unlike passes, and write down what became of each check.
Run by torch.multiprocessing: on the CPU in fp32 over gloo, or on two GPUs in bf16 over NCCL.
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain.assets import asset_dir
from longtrain.data.packing.batch import Batch
from longtrain.decoding.engine import Engine
from longtrain.errors import ConflictError, TrainingError
from longtrain.methods.longspec.config import Config as LongSpecConfig
from longtrain.methods.longspec.spec import SPEC as LONGSPEC
from longtrain.methods.lookaheadkv.config import Config as LookaheadConfig
from longtrain.methods.lookaheadkv.spec import SPEC as LOOKAHEAD
from longtrain.targets.loading import load_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest
from tests.families import usual

WORLD = 2
KINDS = (None, "fsdp2")


def row(target, rank, pairs, seed=3):
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
    batch = Batch(
        ids,
        tuple(bounds),
        learn,
        seed=seed,
        tokens_in_step=int(learn.sum()),
        documents_in_step=documents,
    )
    return batch.to(target.device)


def positions(batch):
    lengths = [b - a for a, b in zip(batch.bounds, batch.bounds[1:], strict=False)]
    return torch.cat([torch.arange(length) for length in lengths]).to(batch.ids_T.device)


def nothing_gathered(target, share=0.6):
    """Every layer's weights are this rank's part again (halves in whole rows), and other memory is free."""
    shards = target.shards
    assert not shards._here and not shards._coming
    held = sum(p.to_local().untyped_storage().nbytes() for p in target.model.model.layers.parameters())
    whole = sum(p.numel() * p.element_size() for p in target.model.model.layers.parameters())
    assert held <= share * whole


def packed_outputs(rank, whole, sharded, held=0.6):
    batch = row(whole, rank, [(5, 9), (20 + 8 * rank, 4), (1, 2)])
    outputs = OutputRequest("none", hidden=(0, 2, -1), kv=(1, 2))
    args = (batch.ids_T, positions(batch), batch.bounds, outputs)
    with torch.no_grad():
        mine, theirs = whole.packed(*args), sharded.packed(*args)
    for layer in outputs.hidden:
        assert torch.equal(mine.hidden[layer], theirs.hidden[layer]), layer
    for layer in outputs.kv:
        assert all(torch.equal(a, b) for a, b in zip(mine.kv[layer], theirs.kv[layer], strict=True))
    logits = [target.head(mine.hidden[-1]) for target in (whole, sharded)]
    assert torch.equal(*logits)
    nothing_gathered(sharded, held)
    assert sharded.shards.seconds_waited() > 0 and sharded.shards.seconds_waited() == 0


def early_exits(rank, whole, sharded):
    """One rank leaves at the first layer and the other at the last, each with a watch."""
    batch, stop = row(whole, rank, [(12, 5)]), 2 * rank
    outputs = OutputRequest("none", stop_at_layer=stop, kv=(stop,))
    mine, theirs = [], []
    with torch.no_grad():
        for target, seen in ((whole, mine), (sharded, theirs)):
            hook = lambda *of_layer, to=seen: to.append(of_layer)  # noqa: E731
            target.packed(batch.ids_T, positions(batch), batch.bounds, outputs, hook=hook)
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
        one, split = (load_target("tiny", device=whole.device, shard=shard, **change) for shard in KINDS)
        assert one.info == split.info
        assert ("(random weights)" in one.info.name) == bool(change)
    assert torch.equal(one.layer_state(3)["mlp.up_proj.weight"], split.layer_state(3)["mlp.up_proj.weight"])


def gradients(spec, config, target, batches):
    """Two steps' losses and gradients; the ranks join after each, as in the training job."""
    torch.manual_seed(7)
    module = spec.build(config, target.info).to(target.device)
    objective = spec.objective(module, target, config).train()
    objective.register_forward_hook(lambda *_: target.join_ranks())
    totals = []
    for batch in batches:
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            loss = objective(batch)
        loss.total.backward()
        totals.append(loss.total.detach())
        totals += [number for pair in loss.metrics.values() for number in pair]
    return totals, {name: value.grad for name, value in module.named_parameters()}


def same_gradients(spec, config, whole, sharded, batches):
    mine, outputs = gradients(spec, config, whole, batches)
    theirs, got = gradients(spec, config, sharded, batches)
    assert outputs.keys() == got.keys() and any(value.any() for value in outputs.values())
    if whole.device.type == "cuda":  # sums over rows are in no fixed order there
        torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-5)
        flat = [torch.cat([grad.flatten() for grad in grads.values()]) for grads in (outputs, got)]
        assert (flat[0] - flat[1]).norm() <= 1e-3 * flat[0].norm()
    else:
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert all(torch.equal(outputs[name], got[name]) for name in outputs)
    nothing_gathered(sharded)


def longspec(rank, whole, sharded):
    """Warm start, chunks of one rank only, and a guard (two more passes) in a row of one rank only."""
    config = LongSpecConfig(window=12, chunk_tokens=16, anchor_offset=True, guard_every=2, warm_start=True)
    batches = [
        row(whole, rank, [(1, 40 * rank + 3), (8, 6)], seed=4 + rank),
        row(whole, rank, [(9, 30)], seed=5 + rank),
    ]
    same_gradients(LONGSPEC, config, whole, sharded, batches)


def lookaheadkv(rank, whole, sharded):
    """Backward goes through the layers; in the second row of rank 1 there is nothing to learn."""
    config = LookaheadConfig(n_lookahead=5, lora_rank=3)
    batches = [
        row(whole, rank, [(17, 4), (9, 0), (20, 3 + rank)]),
        row(whole, rank, [(30, 0 if rank else 7)]),
    ]
    same_gradients(LOOKAHEAD, config, whole, sharded, batches)


def answers(rank, whole, sharded):
    """Rank 0 alone writes; the other helps until both have joined."""
    if rank == 0:
        prompts = [[5, 9, 11, 40, 3], [7, 8]]
        texts = [
            Engine(target).generate(prompts, max_new_tokens=6, ignore_eos=True).tokens
            for target in (whole, sharded)
        ]
        assert texts[0] == texts[1]
    sharded.join_ranks()
    nothing_gathered(sharded)


def a_pass_that_breaks(rank, whole, sharded):
    """An error in the middle of rank 0's pass, of whatever kind, leaves no rank waiting."""
    batch, outputs = row(whole, 0, [(12, 5)]), OutputRequest("none", kv=(2,))

    def hook(layer, *_):
        if layer == 1:
            raise RuntimeError("out of memory")

    if rank == 0:
        try:
            with torch.no_grad():
                sharded.packed(batch.ids_T, positions(batch), batch.bounds, outputs, hook=hook)
        except RuntimeError as error:
            assert str(error) == "out of memory"
        else:
            raise AssertionError("it went unnoticed")
    sharded.join_ranks()
    packed_outputs(rank, whole, sharded)


def refused(rank, whole, sharded):
    for call in (sharded.fuse, lambda: sharded.model.model.layers[0](sharded.head_weight[None])):
        try:
            call()
        except ConflictError as error:
            assert "shard" in str(error)
        else:
            raise AssertionError("it was allowed")


def machines(rank, whole, sharded):
    """On two machines of one rank each, a rank needs no other for its passes."""
    name, socket.gethostname = socket.gethostname, lambda: f"machine{rank}"
    alone = load_target(whole.info.name, device=whole.device, shard="fsdp2")
    socket.gethostname = name
    assert alone.shards.node.size == 1 and alone.info == whole.info
    for _ in range(1 + rank):
        packed_outputs(0, whole, alone, held=1.0)
    alone.join_ranks()


def another_rank_ends(rank, whole, sharded):
    if rank == 1:
        return
    try:
        sharded.join_ranks()
    except TrainingError as error:
        assert "another rank that shares the target ended" in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("it went unnoticed")


def experts(rank, _whole, _sharded):
    """Experts, a router that stays in fp32, and its bias, which is a buffer and stays whole."""
    folder = Path(_whole.info.name).parent / "experts"
    whole, sharded = (load_target(folder, device=_whole.device, shard=shard) for shard in KINDS)
    assert sharded.info == whole.info
    batch = row(whole, rank, [(5, 9), (20 + 8 * rank, 4)])
    args = (batch.ids_T, positions(batch), batch.bounds, OutputRequest("none", hidden=(0, 2, -1)))
    with torch.no_grad():
        mine, theirs = whole.packed(*args), sharded.packed(*args)
    assert all(torch.equal(mine.hidden[layer], theirs.hidden[layer]) for layer in mine.hidden)
    mine, theirs = whole.layer_state(2), sharded.layer_state(2)
    assert mine.keys() == theirs.keys() and "mlp.gate.e_score_correction_bias" in mine
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert mine["mlp.gate.weight"].dtype == torch.float32 and mine["mlp.gate.e_score_correction_bias"].any()


CHECKS = (
    packed_outputs,
    early_exits,
    weights_and_identity,
    longspec,
    lookaheadkv,
    answers,
    experts,
    a_pass_that_breaks,
    refused,
    machines,
    another_rank_ends,
)


def main(rank, folder, kind):
    torch.set_num_threads(1)
    folder, device = Path(folder), f"{kind}:{rank}" if kind == "cuda" else kind
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    found = {}
    try:
        whole, sharded = (load_target(folder / "model", device=device, shard=shard) for shard in KINDS)
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


def run(folder, kind):
    """Start the ranks; check -> what went wrong, of each. Three layers, which two ranks share unevenly."""
    torch.manual_seed(0)
    shape = {**SHAPES["qwen3_micro"], "num_hidden_layers": 3, "intermediate_size": 81}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).save_pretrained(folder / "model")
    tokenizer_files(folder / "model")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**usual("glm4_moe")))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    model.save_pretrained(folder / "experts")
    tokenizer_files(folder / "experts")
    torch.multiprocessing.start_processes(main, (str(folder), kind), nprocs=WORLD, start_method="forkserver")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


def tokenizer_files(folder):
    """The bundled tokenizer's, as the docstring of `load_target` has it."""
    tiny = asset_dir("bundled") / "tiny"
    for file in (*tiny.glob("*token*"), tiny / "chat_template.jinja"):
        (folder / file.name).write_bytes(file.read_bytes())
