"""The benchmarks on shapes of a few thousand weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longtrain.bench import clock, engine, training
from longtrain.bench.suites import Context, bench_of
from longtrain.cache.entry_sets import ReadBudget
from longtrain.costs.model import Sizes
from longtrain.decoding.engine import AUTO, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.methods import get, names
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.tables import of_rows
from longtrain.targets.loading import random_target
from tests.families import usual
from tests.helpers import attached

CPU = Context(torch.device("cpu"), method={"name": "longspec"})


def steps(context: Context = CPU, **changes: Any) -> list[dict[str, Any]]:
    values = {"shape": "auto", "dtype": "auto", "lengths": [32, 96], "chunk_tokens": 16, "repeats": 2}
    return list(training.run(training.BENCH.read({**values, "min_repeats": 1, **changes}, context), context))


@pytest.mark.parametrize("objective", ["kl", pytest.param("ce", marks=pytest.mark.slow)])
def test_a_training_step_counts_its_inputs(objective: str) -> None:
    rows = steps(Context(CPU.device, method={"name": "longspec", "objective": objective}))
    info = random_target("llama_micro").info
    for row in rows:
        kv = row["sequence_tokens"] * info.n_kv_heads * info.head_dim * 4
        hidden = row["sequence_tokens"] * info.hidden_size * 4 if objective == "kl" else 0
        assert (row["inputs"]["k_bytes"], row["inputs"]["v_bytes"]) == (kv, kv)
        assert row["inputs"]["hidden_bytes"] == hidden
        for part in ("target", "draft", "step"):
            assert row[part]["tokens_per_s"] > 0
            assert row[part]["peak_bytes"] is None  # a CPU has no counter


@pytest.mark.parametrize("method", ["lookaheadkv", "kvzap"])
def test_a_step_that_watches_the_pass_is_measured_as_a_whole(method: str) -> None:
    (row,) = steps(Context(CPU.device, method={"name": method}), lengths=[64], response_tokens=16)
    assert (row["prompt_tokens"], row["response_tokens"]) == (48, 16)
    assert row["step"]["ms"]["median"] > 0 and row["target"]["ms"]["median"] > 0
    assert all(row["percent"][part] > 0 for part in ("target", "draft"))
    assert "draft" not in row and "inputs" not in row


def test_plan_names_a_suite_that_measures_the_step() -> None:
    named = {name: get(name).cost.suite for name in names() if get(name).objective is not None}
    assert len(named) > 5 and {one for one in named.values() if bench_of(one) is not training.BENCH} == set()


@pytest.mark.parametrize("method", [None, {"name": "snapkv"}, {"name": "pretrain"}, {"name": "quantspec"}])
def test_only_what_trains_against_a_target_has_a_step(method: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match="method"):
        steps(Context(CPU.device, method=method))


def test_growth_is_of_peak_over_inputs() -> None:
    def row(peak: int, inputs: int) -> dict[str, dict[str, int]]:
        return {"draft": {"peak_bytes": peak}, "inputs": {"total_bytes": inputs}}

    assert training.growth(row(1000, 100), row(1330, 400)) == {"growth": pytest.approx(1.1)}
    assert not training.growth(row(1000, 100), {"failed": {}})


def test_a_length_that_does_not_fit_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = training.random_batch

    def fails(length: int, *rest: int, **more: int) -> object:
        if length == 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return real(length, *rest, **more)

    monkeypatch.setattr(training, "random_batch", fails)
    first, second = steps(repeats=1)
    assert "out of memory" in first["failed"] and "step" in second


def test_the_recorded_pass_gives_the_loss_of_the_real_one() -> None:
    """Otherwise the draft's step would be measured on something else."""
    target, spec = random_target("qwen3_micro"), get("longspec")
    config = spec.config(chunk_tokens=16)
    trained = training.prepared(spec, config, target, seed=0)
    batch = training.random_batch(48, 47, target.info.vocab_size, seed=3)
    whole = trained.objective(batch)
    trained.target.recorded = trained.target.again(batch)
    torch.testing.assert_close(trained.objective(batch).total, whole.total, rtol=0, atol=0)


def test_documents_fill_the_sequence_and_each_has_its_labels() -> None:
    batch = training.random_batch(50, 3, 64, seed=3, documents=4)
    assert batch.bounds == (0, 12, 24, 36, 50) and batch.documents_in_step == 4
    assert batch.loss_mask_T.nonzero().flatten().tolist() == [9, 10, 11, 21, 22, 23, 33, 34, 35, 47, 48, 49]
    assert batch.tokens_in_step == 12


def test_engine_suite_measures_plain_and_drafted() -> None:
    target = random_target("llama_micro")
    parts = attached("longspec", target, window=8)
    how = engine.EngineSettings((4,), max_new_tokens=6, repeats=2)
    row = engine.measure(target, parts, [[3, 4, 5, 6], [7, 8, 9, 10]], TreeShape((1, 1)), how, Sampling())
    assert row["same"] == 1.0
    assert 1.0 <= row["draft"]["tau"] <= 3.0
    assert row["ratio"] > 0 and row["plain"]["target_forwards"] == 6


def test_engine_suite_times_later_calls_of_an_engine_that_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first calls learn is there: they share the engine with the counted ones."""
    target = random_target("llama_micro")
    calls: list[Engine] = []
    generate = Engine.generate

    def counted(self: Engine, *args: Any, **keys: Any) -> Any:
        if not isinstance(keys["shape"], TreeShape):
            calls.append(self)
        return generate(self, *args, **keys)

    monkeypatch.setattr(Engine, "generate", counted)
    how = engine.EngineSettings((4,), max_new_tokens=6, repeats=2)
    parts = attached("longspec", target, window=8)
    row = engine.measure(target, parts, [[3, 4, 5, 6]], AUTO, how, Sampling())
    assert len(calls) == engine.SETTLING + how.warmup + how.repeats and len(set(map(id, calls))) == 1
    assert row["same"] == 1 and row["draft"]["costs"]


def test_engine_suite_tells_what_verification_reads_of_the_experts() -> None:
    """Of 8 experts, 2 a token: a plain step of two texts, and three tokens of each."""
    target = random_target(usual("qwen3_moe"))
    parts = attached("longspec", target, window=8)
    how = engine.EngineSettings((4,), max_new_tokens=6, repeats=1)
    row = engine.measure(target, parts, [[3, 4, 5, 6], [7, 8, 9, 10]], TreeShape((1, 1)), how, Sampling())
    told, size = row["experts"], Sizes.of(target.info)
    assert told["plain"] == pytest.approx(8 * (1 - 0.75**2)) and told["verify"] == 8 * (1 - 0.75**6)
    assert told["weights"] == (size.read(6) + size.head) / (size.read(2) + size.head) > 1
    table = engine.BENCH.table([row], how, Context(torch.device("cpu")))
    assert "experts read to verify" in table and "6.58" in table


def test_engine_suite_measures_what_chooses_rows() -> None:
    """By itself, and as what a draft beside it is compared with; as many rows a step as were asked for."""
    reading = {"budget_tokens": 12, "sinks": 2, "window": 4, "every": 4}
    context = Context(torch.device("cpu"), method={"name": "sparse", "rule": "random"}, reading=reading)
    how = engine.EngineSettings((24,), shape="llama_micro", max_new_tokens=6, repeats=1)
    (row,) = engine.run(how, context)
    assert row["same_cache"]["tokens_per_s"]["median"] > 0 and "draft" not in row
    ratio = row["same_cache"]["tokens_per_s"]["median"] / row["plain"]["tokens_per_s"]["median"]
    assert row["same_cache_of_plain"] == pytest.approx(ratio)
    assert "own cache or rows tok/s" in engine.BENCH.table([row], how, context)
    target = random_target("llama_micro", seed=0)
    parts = engine.parts_of(context, target, None)
    assert parts is not None and parts.selector is not None
    assert parts.selector.budget == ReadBudget(12, sinks=2, window=4, every=4)
    draft = attached("longspec", target, window=8)
    prompts = [list(range(3, 27)), list(range(9, 33))]
    drafted = engine.measure(target, draft.merge(parts), prompts, TreeShape((1, 1)), how, Sampling())
    assert drafted["same"] == 1.0 and drafted["same_cache_ratio"] > 0
    with pytest.raises(ConfigError, match=r"select.every=4 and nothing that takes it; leave it out"):
        engine.parts_of(replace(context, method=None, reading={"every": 4}), target, None)


def test_engine_suite_measures_baselines() -> None:
    target = random_target("llama_micro")
    draft = attached("longspec", target, window=8)
    parts = draft.merge(Parts(evictor=SnapKV(Budget(6), window=2), name="snapkv"))
    how = engine.EngineSettings((12,), max_new_tokens=6, repeats=1, baselines=("hugging_face", "uncaptured"))
    row = engine.measure(target, parts, [list(range(3, 15))] * 2, TreeShape((2, 2)), how, Sampling())
    for way in ("plain", "uncaptured", "hugging_face", "same_cache", "draft"):
        assert row[way]["tokens_per_s"]["median"] > 0
    assert row["same"] == 1.0 and row["same_cache"]["cache_gib"] < row["plain"]["cache_gib"]


def test_table_and_spread() -> None:
    rows = [{"n": 12345.6, "in": {"x": 0.12345}}, {"n": 2}]
    table = of_rows(rows, {"count": "n", "inner": "in.x"})
    assert table.splitlines()[2:] == ["| 12,346 | 0.123 |", "| 2 | - |"]
    assert clock.spread([4.0]) == {"median": 4.0, "p10": 4.0, "p90": 4.0}
    assert clock.spread([float(i) for i in range(11)]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}


def test_the_parts_of_a_training_step_add_up() -> None:
    """EAGLE-3 on a CPU: every part takes time but the copies, and the shares are of the whole."""
    (row,) = steps(Context(CPU.device, method={"name": "eagle3"}), lengths=[64])
    percent = row["percent"]
    assert sum(percent.values()) == pytest.approx(100)
    assert all(percent[name] > 0 for name in ("target", "draft", "loss", "optimizer"))
    assert percent["copies"] == 0
