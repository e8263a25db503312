"""The eviction benchmark end to end on a few thousand weights, and that no fault loses a figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longtrain.bench import clock, eviction, first_token, importance_kernels, training
from longtrain.bench.suites import Context
from longtrain.decoding.engine import Engine
from longtrain.errors import ConfigError
from longtrain.targets.loading import random_target

CPU = Context(torch.device("cpu"))
METHODS = ("lookaheadkv", "snapkv", "laq", "speckv")
SMALL: dict[str, Any] = {
    "sections": [],
    "shape": "llama_micro",
    "draft_shape": "llama_micro",
    "dtype": "float32",
    "lengths": [96],
    "methods": METHODS,
    "budget_tokens": 48,
    "warmup": 1,
    "repeats": 2,
    "min_repeats": 2,
    "train": "lookaheadkv",
    "train_prompts": [64],
    "train_response": 16,
    "kernels": [[4, 64]],
    "kernel_repeats": 2,
    "theory_lengths": [4096],
    "gpus": ["H100"],
}


def settings(**changes: Any) -> eviction.EvictionCostSettings:
    found: eviction.EvictionCostSettings = eviction.BENCH.read({"cost": {**SMALL, **changes}}, CPU)
    return found


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(eviction.run(settings(), CPU))


def of(rows: list[dict[str, Any]], section: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["section"] == section]


def test_all_sections_are_measured_in_order(rows: list[dict[str, Any]]) -> None:
    assert tuple(dict.fromkeys(row["section"] for row in rows)) == tuple(eviction.SECTIONS)
    assert not [row for row in rows if "failed" in row]
    json.dumps(rows, allow_nan=False)


def test_first_tokens_are_paired_with_the_full_cache(rows: list[dict[str, Any]]) -> None:
    found = {row["method"]: row for row in of(rows, "ttft")}
    assert tuple(found) == ("full", *METHODS)
    target = random_target("llama_micro")
    for name in METHODS:
        row = found[name]
        assert row["pairs"] == len(row["pairs_ms"]) == 2 and row["ms"]["median"] > 0
        assert row["extra_ms"]["p10"] <= row["extra_ms"]["median"] <= row["extra_ms"]["p90"]
        assert row["overhead_percent"] == pytest.approx(100 * (row["paired_ratio"]["median"] - 1))
        assert row["cache_bytes_after"] < row["cache_bytes_before"]
        assert row["peak_bytes"] is None and row["device_ms"] is None  # a CPU has no such counters
        assert "theory_ms" not in row  # nothing is predicted for a CPU
    whole = 2 * target.info.n_layers * target.info.n_kv_heads * target.info.head_dim * 4 * 96
    assert found["full"]["cache_bytes_before"] >= whole
    assert found["lookaheadkv"]["cache_bytes_after"] >= whole * 48 / 96


def test_parts_are_timed_alone(rows: list[dict[str, Any]]) -> None:
    found = of(rows, "parts")
    assert [row["method"] for row in found] == ["lookaheadkv", "snapkv"]
    for row in found:
        for part in ("scores", "selection", "compaction"):
            assert row[part]["ms"]["median"] > 0


def test_the_training_step_holds_a_prefill(rows: list[dict[str, Any]]) -> None:
    (row,) = of(rows, "training")
    assert (row["prompt_tokens"], row["response_tokens"]) == (64, 16)
    assert row["ratio"] == pytest.approx(row["step"]["ms"]["median"] / row["prefill"]["ms"]["median"])
    assert row["ratio"] > 1  # it does all of the prefill and more
    assert row["trained_parameters"] > 0


def test_kernels_stand_beside_their_twins(rows: list[dict[str, Any]]) -> None:
    found = of(rows, "kernels")
    assert [row["call"] for row in found] == list(importance_kernels.PRODUCTS)
    for row in found:
        assert row["relative_difference"] < 1e-5  # fp32, sums in another order
        assert row["speed"] == pytest.approx(row["torch_ms"]["median"] / row["kernel_ms"]["median"])
        assert row["bound_ms"] > 0


def test_a_response_is_scored_and_runs_no_suffix() -> None:
    context, info = Context(torch.device("cpu")), random_target("llama_micro").info
    found = importance_kernels.measure(context, torch.float32, info, ((200, 64),), repeats=2)
    calls = [row["call"] for row in found]
    assert calls == ["suffix_lse", "importance"]


def test_the_bound_counts_what_must_be_read(rows: list[dict[str, Any]]) -> None:
    info = random_target("llama_micro").info
    by_call = {row["call"]: row["bound_bytes"] for row in of(rows, "kernels")}
    keys = 64 * info.n_kv_heads * info.head_dim * 4
    assert by_call["suffix_lse"] == keys
    assert by_call["importance"] == keys + 64 * info.n_heads * 4
    assert by_call["suffix_attention"] == 2 * keys + 64 * info.n_heads * 4


def test_the_report_shows_every_section(rows: list[dict[str, Any]]) -> None:
    text = eviction.report(rows, settings(), CPU)
    for section in eviction.SECTIONS.values():
        assert f"## {section.title}" in text
    assert (
        "lookaheadkv second pass fused +" in text and "| 4096 | causal | 61.6 | 88.9 | 1.01 | 0.835 |" in text
    )
    assert eviction.pictures(rows)["eviction.png"].startswith(b"\x89PNG")
    assert not eviction.pictures(of(rows, "theory"))


def test_a_failing_system_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = first_token.first_token

    def fails(engine: Engine, prompt: list[int]) -> Any:
        if engine.parts.name == "snapkv":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return real(engine, prompt)

    monkeypatch.setattr(first_token, "first_token", fails)
    full, snap, laq = eviction.run(settings(sections=["ttft"], methods=["snapkv", "laq"]), CPU)
    assert full["method"] == "full" and "ms" in full
    assert "out of memory" in snap["failed"] and "extra_ms" not in snap
    assert laq["pairs"] == 2


def test_a_failing_section_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Iterator[dict[str, Any]]:
        yield {"prompt_tokens": 1}
        raise RuntimeError("kernel launch failed")

    monkeypatch.setattr(training, "measure", fails)
    monkeypatch.setattr(first_token, "measure_parts", fails)
    found: list[dict[str, Any]] = []
    with pytest.raises(RuntimeError, match="kernel launch failed"):
        for row in eviction.run(settings(sections=["training", "kernels", "parts"]), CPU):
            found.append(row)
    assert [row["section"] for row in found] == ["parts"] * 2 + ["training"] * 2 + ["kernels"] * 4
    assert found[1]["failed"] == "RuntimeError: kernel launch failed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sections": ["speed"]}, "suite.cost.sections=.*allowed: each once of theory, ttft"),
        ({"shape": "llama9"}, "suite.cost.shape=llama9; known: llama_micro"),
        ({"draft_shape": "llama32_1b"}, "another vocabulary than llama_micro"),
        ({"gpus": ["TPU"]}, "allowed: each once of H100, H200"),
        ({"methods": ["snapkw"]}, "unknown eviction policy 'snapkw'; known: streaming_llm"),
        ({"methods": ["kvzip"]}, "come without a tokenizer"),
        ({"lengths": [4096]}, "has 2048; choose shorter lengths"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(eviction.run(settings(**change), CPU))


def test_rounds_stop_when_the_time_is_over_but_not_before_the_least() -> None:
    going = clock.rounds(10, least=2, seconds=0.0)
    assert [going(i) for i in range(4)] == [True, True, False, False]
    going = clock.rounds(3, least=1, seconds=60.0)
    assert [going(i) for i in range(4)] == [True, True, True, False]


def test_differences_are_taken_pair_by_pair() -> None:
    """A clock that drifts by more than the difference must not hide it."""
    base = [clock.Timing(ms) for ms in (100.0, 200.0, 300.0)]
    other = [clock.Timing(ms) for ms in (101.0, 202.0, 303.0)]
    found = clock.versus(base, other)
    assert found["extra_ms"]["median"] == pytest.approx(2.0)
    assert found["paired_ratio"]["p10"] == found["paired_ratio"]["p90"] == pytest.approx(1.01)
    assert found["overhead_percent"] == pytest.approx(1.0)


@pytest.mark.slow
def test_the_job_writes_json_markdown_and_picture(measured: Any, tmp_path: Path) -> None:
    words = {"lengths": "[64]", "budget_tokens": 48, "methods": "[lookaheadkv,snapkv]", "repeats": 2}
    words |= {"min_repeats": 2, "train_prompts": "[48]", "train_response": 8, "kernels": "[[2,32]]"}
    words |= {"theory_lengths": "[4k]", "kernel_repeats": 2, "warmup": 1}
    rows = measured("eviction", *(f"suite.cost.{key}={value}" for key, value in words.items()))
    folder = tmp_path / "bench"
    found = json.loads((folder / "eviction.json").read_text())
    assert found["suite"] == "eviction" and found["versions"]["torch"] and "gpus" in found["machine"]
    assert found["settings"]["budget_tokens"] == 48
    assert {row["section"] for row in rows} == set(eviction.SECTIONS)
    assert (folder / "eviction.md").read_text().startswith("# Cost of eviction: llama_micro on CPU")
    assert (folder / "eviction.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "config.yaml").exists()


@pytest.mark.gpu
def test_a_gpu_has_counters_too() -> None:
    changes = {"dtype": "bfloat16", "lengths": [512], "budget_tokens": 64, "repeats": 3, "min_repeats": 3}
    more = {"train_prompts": [512], "train_response": 64, "kernels": [[32, 1024], [512, 1024]]}
    how = settings(**changes, **more, kernel_repeats=5)
    found = list(eviction.run(how, Context(torch.device("cuda"))))
    assert not [row for row in found if "failed" in row]
    for row in of(found, "ttft"):
        assert row["peak_bytes"] > 0 and 0 < row["device_ms"]["median"] <= 1.05 * row["ms"]["median"]
    (training,) = of(found, "training")
    assert training["step"]["peak_bytes"] > training["before_bytes"] > 0
    for row in of(found, "kernels"):
        assert row["relative_difference"] < 0.03  # outputs and gradients are bf16, of 8 bits
        assert row["kernel_ms"]["p10"] > 0
