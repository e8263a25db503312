"""`bench suite=linears` on a CPU, where plain torch serves."""

import json

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from longtrain import cli
from longtrain.assets import asset_dir
from longtrain.bench import linears
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.jobs import bench
from longtrain.targets.shapes import SHAPES


@pytest.fixture
def composed(tmp_path):
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):

        def make(*overrides):
            common = ["suite=linears", "target.device=cpu", f"run_dir={tmp_path}", "suite.repeats=2"]
            return compose("bench", overrides=[*common, *overrides])

        yield make


def test_layers_of_a_published_shape():
    """Llama-3.1-8B: 7.5 billion weights in linear layers, as its config says."""
    layers, per_step = linears.layers_of(Sizes.of_keys(SHAPES["llama31_8b"]))
    assert layers["qkv"] == (6144, 4096) and layers["gate_up"] == (28672, 4096)
    assert sum(per_step[name] * F * K for name, (F, K) in layers.items()) == 7_504_658_432
    tied, _ = linears.layers_of(Sizes.of_keys(SHAPES["llama32_1b"]))
    assert tied["out"] == (2048, 2048)


def test_from_the_configuration_to_the_file(composed, tmp_path, capsys):
    bench.run(composed("suite.rows=[1,3]"))
    rows = json.loads((tmp_path / "bench" / "linears.json").read_text())["rows"]
    assert len(rows) == 2 * (5 * 2 + 2)
    assert {row["layer"] for row in rows} == {"qkv", "out", "gate_up", "down", "head", "a step"}
    layers = [row for row in rows if row["layer"] != "a step"]
    assert all(row["relative_difference"] < 1e-5 and row["ms"]["median"] > 0 for row in layers)
    for step in (row for row in rows if row["layer"] == "a step"):
        mine = [x for x in layers if (x["weights"], x["rows"]) == (step["weights"], step["rows"])]
        want = sum((1 if x["layer"] == "head" else 2) * x["ms"]["median"] for x in mine)
        assert step["ms"]["median"] == pytest.approx(want)
    assert all(("stock" in row) == (row["weights"] == "dense") for row in rows)
    assert "a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("suite.weights=[int3]", r"suite.weights=\['int3'\]; allowed: a list, each dense, int4"),
        ("suite.rows=[]", r"suite.rows=\[\]"),
        ("suite.shape=gpt9", "suite.shape=gpt9; known: llama_micro"),
    ],
)
def test_wrong_values(composed, override, message):
    with pytest.raises(ConfigError, match=message):
        bench.run(composed(override))
