"""A rank's memory and time: against what was measured on an H200, and against tensors that are counted."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from longtrain.costs import ranks
from longtrain.costs.footprint import CONTEXT, SPARE, Spread, fits
from longtrain.costs.hardware import GPUS
from longtrain.costs.model import Sizes
from longtrain.costs.ranks import Job
from longtrain.costs.training import PackedSequence, target_pass_bytes
from longtrain.methods import get
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES

RESULTS = Path(__file__).parents[2] / "recipes" / "results"
H200 = GPUS["H200"]
DRAFT, MODULE = 251_670_528, 20_553_728
"""Weights that LongSpec and LookaheadKV train at the 8B shape."""


def job(
    method: str,
    tokens: int,
    trained: int,
    *,
    shape: str = "llama31_8b",
    response: int = 0,
    documents: int = 1,
    **keys: Any,
) -> Job:
    spec, size = get(method), Sizes.of_keys(SHAPES[shape])
    row = PackedSequence(tokens, tokens // documents, response)
    step = spec.cost.training(spec.config(**keys), size, row, trained, 2)
    return Job(size, False, 2, trained, 2 * trained, row, step)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_longspec_as_measured_at_8b_shape(index: int) -> None:
    """Peaks to 2%; `bench` keeps no gradients of the step before, which training does."""
    measured = json.loads((RESULTS / "draft_memory.json").read_text())["rows"][index]
    one = job("longspec", measured["row_tokens"], DRAFT, chunk_tokens=4096)
    peak = ranks.memory(one, Spread()).peak - 4 * DRAFT
    assert peak == pytest.approx(measured["step"]["peak_bytes"], rel=0.02)


def test_lookaheadkv_as_measured_at_8b_shape() -> None:
    (run,) = [one for one in json.loads((RESULTS / "eviction_cost.json").read_text())["runs"]
              if one["name"] == "four_methods"]  # fmt: skip
    (measured,) = [row for row in run["rows"] if row["section"] == "training"]
    one = job("lookaheadkv", 16384 + 512, MODULE, response=512)
    peak = ranks.memory(one, Spread()).peak - 4 * MODULE
    assert peak == pytest.approx(measured["step"]["peak_bytes"], rel=0.03)
    (measured,) = json.loads((RESULTS / "lookaheadkv_step.json").read_text())["rows"]
    step_s = ranks.seconds(one, Spread(), H200, rows=1).step
    assert step_s == pytest.approx(measured["step"]["ms"]["median"] / 1e3, rel=0.15)


FOUR_GPUS = json.loads((RESULTS / "cluster" / "four_gpus.json").read_text())
TRAINED = {"longspec 8b": DRAFT, "eagle3 8b": 424_689_664}
TRAINED |= {"longspec 70b": 989_880_320, "eagle3 70b": 1_403_027_456}


@pytest.mark.parametrize("row", FOUR_GPUS["scaling"] + FOUR_GPUS["sharded"], ids=lambda row: row["name"])
def test_steps_as_measured_on_four_gpus(row: dict[str, Any]) -> None:
    """Times to 15%, and the plan's that docs/cluster.md shows are today's."""
    method, *words = row["name"].split("-")
    keys: dict[str, Any] = {"objective": "ce"} if method == "longspec" else {}
    if "gpus" in row:
        n = int(row["gpus"])
        one, rows = job(method, 16384, TRAINED[f"{method} 8b"], **keys), 8 // n
        layout = Spread(devices=n, zero=2 if n > 1 else 0)
    else:
        keys |= {"chunk_tokens": 2048} if method == "eagle3" else {}
        tokens, trained = 1024 * int(words[1].removesuffix("k")), TRAINED[f"{method} 70b"]
        one, rows = job(method, tokens, trained, shape="llama33_70b", **keys), 1
        layout = Spread(devices=4, zero=2, offload=method == "longspec", shard=True)
    step_s = ranks.seconds(one, layout, H200, rows=rows).step
    assert step_s == pytest.approx(row["measured_step_s"], rel=0.15)
    assert step_s == pytest.approx(row["plan_step_s"])


@pytest.mark.parametrize("window, documents", [(0, 1), (1023, 1), (0, 8)])
def test_steps_as_measured_at_a_small_shape(window: int, documents: int) -> None:
    """Small products and launches bound them: what a layer and a micro-batch take beside the arithmetic."""
    name = "eagle3" + (" window" if window else "") + (" eight documents" if documents > 1 else "")
    runs = json.loads((RESULTS / "draft_step.json").read_text())["runs"]
    (measured,) = [run for run in runs if run["name"] == name]
    keys = {"depths": 5, "draft_vocab_size": 16384, "fc_norm": True, "norm_output": True, "window": window}
    one = job("eagle3", 16384, 14_528_448, shape="smollm2_135m", documents=documents, **keys)
    step_s = ranks.seconds(one, Spread(), H200, rows=1).step
    assert step_s == pytest.approx(measured["step_ms"]["median"] / 1e3, rel=0.15)


class Counted(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is on, and their peak.

    Args:
        known: tensors that are not counted, since they were there before.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {value.untyped_storage()._cdata for value in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map(self._see, out)
        return out

    def _see(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata in self.seen:
            return
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@torch.no_grad()
def test_the_pass_allocates_what_is_said() -> None:
    """Wide MLP, so that it holds the peak; masks of the CPU's attention are small beside it."""
    target = random_target({**SHAPES["llama_micro"], "intermediate_size": 1024}, dtype=torch.float32)
    size, row = Sizes.of(target.info), PackedSequence(1024, 256)
    ids_T, pos_T = torch.zeros(1024, dtype=torch.int64), torch.arange(256).repeat(4)
    with Counted(ids_T, pos_T, *target.parameters(), *target.buffers()) as counted:
        target.packed(ids_T, pos_T, (0, 256, 512, 768, 1024))
    assert counted.peak == pytest.approx(target_pass_bytes(size, row, itemsize=4), rel=0.01)


def test_what_ranks_share() -> None:
    one = job("longspec", 32768, DRAFT)
    alone = ranks.memory(one, Spread())
    ddp = ranks.memory(one, Spread(devices=8, nodes=2))
    zero = ranks.memory(one, Spread(devices=8, nodes=2, zero=2))
    assert ddp.peak == alone.peak + 4 * DRAFT  # buckets
    assert zero.trained == alone.trained - 8 * DRAFT + 12 * DRAFT // 16
    assert zero.peak < alone.peak and zero.host == 8 * ranks.PROCESS
    offloaded = ranks.memory(one, Spread(devices=8, nodes=2, zero=2, offload=True))
    assert offloaded.trained == zero.trained - 12 * DRAFT // 16
    # moments and fp32 weights, the gradients and their copy: on each machine those of 8 of 16 ranks
    assert offloaded.host - zero.host == (12 + 8) * DRAFT // 2
    sharded = ranks.memory(one, Spread(devices=8, nodes=2, shard=True))
    layers = one.layer_bytes * 32
    assert sharded.target == alone.target - layers + layers // 8  # machines are copies of each other
    assert sharded.gathered == 3 * one.layer_bytes


def test_times_of_ranks() -> None:
    one = job("longspec", 16384, DRAFT)
    alone, two = (ranks.seconds(one, Spread(devices=n), H200, rows=1) for n in (1, 2))
    assert alone.reduce == 0 and 1.8 < 2 * alone.step / two.step < 2  # tokens a second of two GPUs over one
    far = ranks.seconds(one, Spread(devices=8, nodes=2, network_bytes_per_s=50e9), H200, rows=1)
    near = ranks.seconds(one, Spread(devices=16), H200, rows=1)
    assert far.reduce == pytest.approx(9 * near.reduce)  # 450 GB/s against 50
    sharded = ranks.seconds(one, Spread(devices=2, shard=True), H200, rows=1)
    assert 0 < sharded.gather < 0.01 * sharded.target  # hidden behind the layer before but for the first
    short = ranks.seconds(job("longspec", 256, DRAFT), Spread(devices=2, shard=True), H200, rows=1)
    assert short.gather > short.target  # nothing to hide behind
    assert ranks.seconds(one, Spread(), H200, rows=1, stored=1.0).target == 0


def test_a_row_fits_as_long_as_there_is_room() -> None:
    big = job("longspec", 32768, 989_880_320, shape="llama31_8b")
    peak = ranks.memory(big, Spread()).peak
    full = int((H200.memory_bytes - CONTEXT) / (1 + SPARE)) + 1
    assert fits(peak, H200.memory_bytes) and fits(full - 2, H200.memory_bytes)
    assert not fits(full, H200.memory_bytes)
