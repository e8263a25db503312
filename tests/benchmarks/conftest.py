"""The suites of `benchmarks/` as `python -m benchmarks` runs them, on a CPU and in a folder of the test."""

import json

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import benchmarks
from longtrain import cli
from longtrain.assets import asset_dir
from longtrain.bench import suites
from longtrain.config import RunConfig
from longtrain.jobs import bench


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    for name, module in benchmarks.SUITES.items():
        monkeypatch.setitem(suites.SUITES, name, module)


@pytest.fixture
def measured(tmp_path, root):
    """`measured(suite, *overrides)`: the rows of the JSON that the suite wrote in `tmp_path / "bench"`."""
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):

        def run(suite, *overrides):
            own = f"hydra.searchpath=[file://{root}/benchmarks/conf]"
            common = [own, f"suite={suite}", "target.device=cpu", f"run_dir={tmp_path}"]
            bench.run(RunConfig.from_hydra(compose("bench", overrides=[*common, *overrides])))
            return json.loads((tmp_path / "bench" / f"{suite}.json").read_text())["rows"]

        yield run
