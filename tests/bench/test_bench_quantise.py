"""`bench suite=quantise` on a CPU, where plain torch serves."""

import json

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from longtrain import cli
from longtrain.assets import asset_dir
from longtrain.cache.room import hierarchical_bytes
from longtrain.errors import ConfigError
from longtrain.jobs import bench


@pytest.fixture
def composed(tmp_path):
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):

        def make(*overrides):
            common = ["suite=quantise", "target.device=cpu", f"run_dir={tmp_path}", "suite.repeats=2"]
            return compose("bench", overrides=[*common, *overrides])

        yield make


def test_from_the_configuration_to_the_file(composed, tmp_path, capsys):
    bench.run(composed("suite.lengths=[700,300]"))
    rows = json.loads((tmp_path / "bench" / "quantise.json").read_text())["rows"]
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


def test_what_does_not_fit_says_so(composed, tmp_path, monkeypatch):
    monkeypatch.setattr("longtrain.cache.room.free_bytes", lambda device: 2**20)
    bench.run(composed("suite.lengths=[4k]", "suite.splits=[floor]"))
    (row,) = json.loads((tmp_path / "bench" / "quantise.json").read_text())["rows"]
    assert row["failed"].startswith("out of memory: a hierarchical KV cache for 1 sequence")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("suite.splits=[ceil]", r"suite.splits=\['ceil'\]; allowed: a list, each floor, rtn"),
        ("suite.lengths=[]", r"suite.lengths=\[\]"),
        ("suite.shape=qwen3_micro", "heads of size 32"),
    ],
)
def test_wrong_values(composed, words, message):
    with pytest.raises(ConfigError, match=message):
        bench.run(composed(words))
