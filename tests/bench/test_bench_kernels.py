"""`bench suite=kernels` on a CPU, where the kernels' torch twins serve."""

import json
from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from longtrain import cli
from longtrain.assets import asset_dir
from longtrain.bench import attention_baselines as stock
from longtrain.bench import decoding_attention
from longtrain.bench.decoding_attention import RECENT, AttentionCall, KernelsSettings
from longtrain.bench.suites import Context
from longtrain.errors import ConfigError
from longtrain.jobs import bench
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


@pytest.fixture
def composed(tmp_path):
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):

        def make(*overrides):
            common = ["suite=kernels", "target.device=cpu", f"run_dir={tmp_path}", "suite.repeats=2"]
            return compose("bench", overrides=[*common, *overrides])

        yield make


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
    want, _ = tree_attention(q, k, v, torch.tensor([40]), seen, scale=16**-0.5)
    torch.testing.assert_close(work(k, v), want)


def test_bytes_of_a_call():
    """A block of 128 tokens and heads of 128: 17408 bytes in INT4, 33792 in INT8, 65536 in bf16."""
    blocks, recent = 254, RECENT
    keys = 128 * blocks + recent
    dense = AttentionCall("dense", 32, 8, 1, keys)
    assert dense.bytes == 8 * (65536 * blocks + 512 * recent)
    assert replace(dense, cache="int4").bytes == 8 * (17408 * blocks + 512 * recent)
    assert replace(dense, cache="int8").bytes == 8 * (33792 * blocks + 512 * recent)
    assert dense.flops == 4 * 32 * (keys + 1) * 128


def test_the_suite_writes_what_it_measured(composed, tmp_path, capsys):
    cfg = composed("suite.cells=[[dense,1,512],[int4,1,512],[int8,3,512],[dense,9,512]]")
    bench.run(cfg)
    rows = json.loads((tmp_path / "bench" / "kernels.json").read_text())["rows"]
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


def test_no_picture_of_nothing():
    assert decoding_attention.pictures([{"failed": "out of memory"}]) == {}


def test_a_second_round_has_as_many_kv_heads_as_query_heads():
    found = asked(cells=(), mha_heads=4, mha_cells=(("int4", 1, 1024),)).calls
    assert found == [AttentionCall("int4", 4, 4, 1, 1024, 64)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("suite.cells=[[int3,1,1k]]", "dense, int8 or int4"),
        ("suite.cells=[[dense,1]]", r"allowed: a list, each \[cache, new rows, keys\]"),
        ("suite.cells=[[int4,129,1k]]", "1 to 128 rows"),
        ("suite.cells=[[int4,1,128]]", "384 keys or more"),
        ("suite.heads=[4,3]", "query heads a multiple"),
        ("suite.baselines=[magic]", r"suite.baselines=\['magic'\]; allowed: a list, each flash"),
        ("suite.dtype=int8", "suite.dtype=int8"),
        ("suite.cells=[]", r"suite.cells=\[\]"),
    ],
)
def test_wrong_settings_are_refused(composed, override, message):
    with pytest.raises(ConfigError, match=message):
        bench.run(composed(override))
