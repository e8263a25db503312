"""The arithmetic of `longtrain plan` against models that are built."""

from __future__ import annotations

import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from longtrain.costs import training as estimate
from longtrain.costs.model import Sizes
from longtrain.costs.training import PackedSequence, StepCost, draft_step
from longtrain.methods import get
from longtrain.methods.lookaheadkv.config import Config
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES

Run = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize("shape", ["llama_micro", "qwen3_micro"])
def test_parameters_are_those_of_the_model(shape: str) -> None:
    target = random_target(shape)
    matrices = sum(p.numel() for p in target.parameters() if p.dim() == 2)
    assert estimate.target_parameters(Sizes.of(target.info), tied=False) == matrices


def test_cache_bytes_are_those_of_the_cache() -> None:
    target = random_target("llama_micro")
    cache = target.new_cache(1, 64, 8)
    k_and_v = estimate.kv_bytes_per_token(Sizes.of(target.info), itemsize=4) * (64 + 8)
    assert k_and_v <= cache.bytes() <= 1.05 * k_and_v


def test_memory_grows_by_the_inputs_and_flops_with_the_documents() -> None:
    size = Sizes.of(random_target("llama_micro").info)
    short, long = (PackedSequence(n, n) for n in (64, 128))
    costs = [
        draft_step(size, row, trained=10, itemsize=2, chunk_tokens=32, window=8) for row in (short, long)
    ]
    assert costs[0].module == costs[1].module and costs[1].inputs == 2 * costs[0].inputs
    assert estimate.target_flops(size, long) > 2 * estimate.target_flops(size, short)


def test_a_suffix_costs_what_it_reads_and_little_else() -> None:
    """Llama-3.1-8B at 16K: K and V of 31 layers 2.08 GB, scores 65 MB twice; rows 2.2 TF, true scores 4.4."""
    size, cost = Sizes.of_keys(SHAPES["llama31_8b"]), get("lookaheadkv").cost

    def step(doc_tokens: int, response: int = 0) -> StepCost:
        return cost.training(Config(), size, PackedSequence(16384, doc_tokens, response), 0, 2)

    alone = step(16384)
    assert alone.inputs == 16384 * (131072 + 2 * 32 * 32 * 4) * 31 // 32
    assert 0.9e12 < alone.flops < 2.7e12
    assert step(16384, 512).flops - alone.flops == 4 * 32 * 4096 * 512 * 16384
    assert step(4096).module == 4 * alone.module


def test_plan_of_an_eviction_module(run: Run) -> None:
    one = "data.prompt_tokens=[16384,16384]"  # a document fills its row, as measured
    out = run("plan", "+recipe=lookaheadkv_llama8b", one, "quiet=true").stdout
    (line,) = [line for line in out.splitlines() if line.startswith("| 16896")]
    row = [cell.strip() for cell in line.split("|")]
    assert "bench suite=training" in out
    assert float(row[8]) == pytest.approx(
        19.76 + 0.08, rel=0.02
    )  # measured, and gradients that training keeps


def test_plan_needs_no_weights_and_no_network(run: Run) -> None:
    done = run("plan", "+recipe=longspec_llama8b_long", "quiet=true")
    assert done.returncode == 0, done.stderr
    weights = re.search(r"([\d.]+) B weights", done.stdout)
    trained = re.search(r"([\d.]+) M weights", done.stdout)
    assert weights is not None and float(weights[1]) == pytest.approx(8.03, abs=0.01)
    assert trained is not None and float(trained[1]) == pytest.approx(251.7, abs=0.1)  # LongSpec's draft
    assert "| 32768 | 32768 |" in done.stdout


def test_plan_without_a_recipe_says_what_to_do(run: Run) -> None:
    done = run("plan", "quiet=true")
    assert done.returncode == 1 and "pass +recipe=NAME" in done.stderr
    done = run("plan", "+recipe=longspec_small", "quiet=true")
    assert done.returncode == 1 and "cannot know the shape of target.path=null" in done.stderr
