"""The first-token suite end to end on a few thousand weights, and that no error loses a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longtrain.bench import clock, first_token
from longtrain.bench.suites import Context
from longtrain.costs.hardware import GPUS
from longtrain.decoding.engine import Engine
from longtrain.errors import ConfigError
from longtrain.targets.loading import random_target

CPU = Context(torch.device("cpu"))
SYSTEMS = ("lookaheadkv", "snapkv", "laq", "speckv")
SMALL: dict[str, Any] = {
    "shape": "llama_micro",
    "draft_shape": "llama_micro",
    "dtype": "float32",
    "lengths": [96],
    "systems": SYSTEMS,
    "budget_tokens": 48,
    "warmup": 1,
    "repeats": 2,
    "min_repeats": 2,
}


def settings(**changes: Any) -> first_token.FirstTokenSettings:
    found: first_token.FirstTokenSettings = first_token.BENCH.read({**SMALL, **changes}, CPU)
    return found


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(first_token.run(settings(), CPU))


def test_rows_are_json_without_faults(rows: list[dict[str, Any]]) -> None:
    assert not [row for row in rows if "failed" in row]
    json.dumps(rows, allow_nan=False)


def test_first_tokens_are_paired_with_the_full_cache(rows: list[dict[str, Any]]) -> None:
    found = {row["method"]: row for row in rows}
    assert tuple(found) == ("full", *SYSTEMS)
    target = random_target("llama_micro")
    for name in SYSTEMS:
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


def test_the_report_has_a_row_for_each_system(rows: list[dict[str, Any]]) -> None:
    text = first_token.report(rows, settings(), CPU)
    assert text.startswith("# First token: llama_micro on CPU")
    assert first_token.NOTE in text and "| 96 | speckv | 2 |" in text


def test_a_known_gpu_has_a_prediction_beside_the_measurement() -> None:
    entries = first_token.entries_of(SYSTEMS, CPU)
    found = {
        name: first_token._expected({"method": name, "prompt_tokens": 96}, entries, settings(), GPUS["H100"])
        for name in ("full", *SYSTEMS)
    }
    assert "theory_percent" not in found["full"] and found["full"]["theory_ms"] > 0
    for name in SYSTEMS:
        share = 100 * found[name]["theory_ms"] / found["full"]["theory_ms"]
        assert found[name]["theory_percent"] == pytest.approx(share)


def test_a_failing_system_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = first_token.first_token

    def fails(engine: Engine, prompt: list[int]) -> Any:
        if engine.parts.name == "snapkv":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return real(engine, prompt)

    monkeypatch.setattr(first_token, "first_token", fails)
    full, snap, laq = first_token.run(settings(systems=["snapkv", "laq"]), CPU)
    assert full["method"] == "full" and "ms" in full
    assert "out of memory" in snap["failed"] and "extra_ms" not in snap
    assert laq["pairs"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": "llama9"}, "suite.shape=llama9; known: llama_micro"),
        ({"draft_shape": "llama32_1b"}, "another vocabulary than llama_micro"),
        ({"systems": ["snapkw"]}, "unknown eviction policy 'snapkw'; known: streaming_llm"),
        ({"systems": ["kvzip"]}, "come without a tokenizer"),
        ({"lengths": [4096]}, "has 2048; choose shorter lengths"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(first_token.run(settings(**change), CPU))


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
def test_the_job_writes_json_and_markdown(measured: Any, tmp_path: Path) -> None:
    words = {"budget_tokens": 48, "systems": "[lookaheadkv,snapkv]", "repeats": 2, "min_repeats": 2}
    measured("first_token", "lengths=[64]", *(f"suite.{key}={value}" for key, value in words.items()))
    folder = tmp_path / "bench"
    found = json.loads((folder / "first_token.json").read_text())
    assert found["suite"] == "first_token" and found["versions"]["torch"] and "gpus" in found["machine"]
    assert found["settings"]["budget_tokens"] == 48
    assert (folder / "first_token.md").read_text().startswith("# First token: llama_micro on CPU")
    assert (folder / "config.yaml").exists()


@pytest.mark.gpu
def test_a_gpu_has_counters_too() -> None:
    changes = {"dtype": "bfloat16", "lengths": [512], "budget_tokens": 64, "repeats": 3, "min_repeats": 3}
    found = list(first_token.run(settings(**changes), Context(torch.device("cuda"))))
    assert not [row for row in found if "failed" in row]
    for row in found:
        assert row["peak_bytes"] > 0 and 0 < row["device_ms"]["median"] <= 1.05 * row["ms"]["median"]
