"""Suites of operators on a CPU, where torch serves: `kernels`, `linears`, `node_choice`, `quantise`."""

from dataclasses import replace

import pytest
import torch

from benchmarks import attention_baselines as stock
from benchmarks import decoding_attention, linears
from benchmarks.decoding_attention import RECENT, AttentionCall, KernelsSettings
from longtrain.bench.suites import Context
from longtrain.cache.room import hierarchical_bytes
from longtrain.costs.model import Sizes
from longtrain.targets.shapes import SHAPES
from tests.kernels.plain_attention import tree_attention

CPU = torch.device("cpu")


def asked(**changes):
    few = {
        "dtype": "float32",
        "heads": (4, 2),
        "head_dim": 64,
        "mha_heads": None,
        "mha_cells": (),
        "repeats": 2,
    }
    return KernelsSettings(**{**few, "baselines": (), **changes})


@pytest.mark.parametrize("rows", [1, 5, 9])
@pytest.mark.parametrize("name", ["flash", "packed_flash", "packed_flash_and_masked"])
def test_baselines_compute_what_they_say(name, rows):
    """The exact ones follow the definition; the others are what attention without a mask gives."""
    torch.manual_seed(rows)
    q, k, v = torch.randn(1, 4, rows, 16), torch.randn(1, 2, 40 + rows, 16), torch.randn(1, 2, 40 + rows, 16)
    visible = torch.rand(1, rows, rows) < 0.5
    visible |= torch.eye(rows, dtype=torch.bool)
    work, exact = stock.attention_of(name, stock.StockInputs(q, k, v, 40, visible))
    assert exact is (rows == 1 or name == "packed_flash_and_masked")
    seen = visible if exact else torch.ones_like(visible)
    outputs, _ = tree_attention(q, k, v, torch.tensor([40]), seen, scale=16**-0.5)
    torch.testing.assert_close(work(k, v), outputs)


def test_bytes_of_a_call():
    """A block of 128 tokens and heads of 128: 17408 bytes in INT4, 33792 in INT8, 65536 in bf16."""
    blocks, recent = 254, RECENT
    keys = 128 * blocks + recent
    dense = AttentionCall("dense", 32, 8, 1, keys)
    assert dense.bytes == 8 * (65536 * blocks + 512 * recent)
    assert replace(dense, cache="int4").bytes == 8 * (17408 * blocks + 512 * recent)
    assert replace(dense, cache="int8").bytes == 8 * (33792 * blocks + 512 * recent)
    assert dense.flops == 4 * 32 * (keys + 1) * 128


def test_attention_is_written_as_it_was_measured(measured, tmp_path, capsys):
    calls = "suite.cells=[[dense,1,512],[int4,1,512],[int8,3,512],[dense,9,512]]"
    rows = measured("kernels", calls, "suite.repeats=2")
    assert [(row["cache"], row["rows"]) for row in rows] == [
        ("dense", 1), ("int4", 1), ("int8", 3), ("dense", 9),
    ]  # fmt: skip
    for row in rows:
        assert row["kernel"] == "torch twin" and row["relative_difference"] <= 1e-6
        assert row["ms"]["p10"] <= row["ms"]["median"] <= row["ms"]["p90"]
        times = {name: x["ms"]["median"] for name, x in row["baselines"].items()}
        assert set(times) == {"flash", "packed_flash", "packed_flash_and_masked"}
        assert row["best"]["ms"] == times[row["best"]["name"]]
        assert row["best"]["speed"] == row["best"]["ms"] / row["ms"]["median"]
        assert ("unmasked" in row) is (row["rows"] > 1)
    assert rows[1]["baselines"] == rows[0]["baselines"]  # of one shape, measured once
    assert (tmp_path / "bench" / "kernels.png").read_bytes()[:4] == b"\x89PNG"
    assert "| int8 | 4/2 | 3 | 512 |" in capsys.readouterr().out


def test_a_backend_that_does_not_serve_says_so():
    (row,) = decoding_attention.run(asked(cells=(("dense", 1, 64),), baselines=("cudnn",)), Context(CPU))
    assert "failed" in row["baselines"]["cudnn"] and "best" not in row
    assert list(decoding_attention.pictures([row])) == ["kernels.png"]


def test_layers_of_a_published_shape():
    """Llama-3.1-8B: 7.5 billion weights in linear layers, as its config says."""
    layers, per_step = linears.layers_of(Sizes.of_keys(SHAPES["llama31_8b"]))
    assert layers["qkv"] == (6144, 4096) and layers["gate_up"] == (28672, 4096)
    assert sum(per_step[name] * F * K for name, (F, K) in layers.items()) == 7_504_658_432
    tied, _ = linears.layers_of(Sizes.of_keys(SHAPES["llama32_1b"]))
    assert tied["out"] == (2048, 2048)


def test_a_step_is_the_sum_of_its_linear_layers(measured, capsys):
    rows = measured("linears", "suite.rows=[1,3]", "suite.repeats=2")
    assert len(rows) == 2 * (5 * 2 + 2)
    assert {row["layer"] for row in rows} == {"qkv", "out", "gate_up", "down", "head", "a step"}
    layers = [row for row in rows if row["layer"] != "a step"]
    assert all(row["relative_difference"] < 1e-5 and row["ms"]["median"] > 0 for row in layers)
    for step in (row for row in rows if row["layer"] == "a step"):
        mine = [x for x in layers if (x["weights"], x["rows"]) == (step["weights"], step["rows"])]
        outputs = sum((1 if x["layer"] == "head" else 2) * x["ms"]["median"] for x in mine)
        assert step["ms"]["median"] == pytest.approx(outputs)
    assert all(("stock" in row) == (row["weights"] == "dense") for row in rows)
    assert "a step" in capsys.readouterr().out


def test_a_quantised_prompt_stands_beside_a_copied_one(measured, capsys):
    rows = measured("quantise", "suite.lengths=[700,300]", "suite.repeats=2")
    assert [(row["prompt_tokens"], row["split"]) for row in rows] == [
        (300, "floor"), (300, "rtn"), (700, "floor"), (700, "rtn"),
    ]  # fmt: skip
    sizes = {"n_layers": 2, "n_kv_heads": 2, "head_dim": 64, "batch": 1, "itemsize": 4}
    for row in rows:
        plain = 2 * 2 * 2 * 64 * 4 * row["prompt_tokens"]
        own = hierarchical_bytes(**sizes, max_tokens=row["prompt_tokens"])
        assert row["cache_share"] == own / plain
        assert row["moved_bytes"] == plain + own - 2 * 2 * 2 * 384 * 64 * 4
        assert row["ms"]["median"] > 0 and row["copied"]["median"] > 0 and "failed" not in row
        assert row["tb_per_s"] == pytest.approx(row["of_read"] * row["read_tb_per_s"])
    assert rows[0]["copied"] == rows[1]["copied"]
    assert "| 700 | rtn |" in capsys.readouterr().out


def test_what_does_not_fit_says_so(measured, monkeypatch):
    monkeypatch.setattr("longtrain.cache.room.free_bytes", lambda device: 2**20)
    (row,) = measured("quantise", "suite.lengths=[4k]", "suite.splits=[floor]")
    assert row["failed"].startswith("out of memory: a hierarchical KV cache for 1 sequence")


def test_the_choice_of_nodes_stands_beside_torch(measured, capsys):
    rows = measured("node_choice", "suite.cells=[[2,7,3],[1,1,1]]", "suite.repeats=2")
    assert [(row["batch"], row["nodes"], row["copied"], row["chosen"]) for row in rows] == [
        (2, 7, 3, 7), (1, 1, 1, 1),
    ]  # fmt: skip
    for row in rows:
        assert row["same"] and row["speed"] == row["torch_ms"]["median"] / row["both_ms"]["median"]
        assert all(row[part]["median"] > 0 for part in ("choose_ms", "learn_ms"))
    assert "| 2 | 7 | 3 | 7 |" in capsys.readouterr().out
