"""A suite of `longtrain bench` as the command line runs it, on a CPU and in a folder of the test."""

import json

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from longtrain import cli
from longtrain.assets import asset_dir
from longtrain.config import RunConfig
from longtrain.jobs import bench


@pytest.fixture
def measured(tmp_path):
    """`measured(suite, *overrides)`: the rows of the JSON that the suite wrote in `tmp_path / "bench"`."""
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):

        def run(suite, *overrides):
            common = [f"suite={suite}", "target.device=cpu", f"run_dir={tmp_path}"]
            bench.run(RunConfig.from_hydra(compose("bench", overrides=[*common, *overrides])))
            return json.loads((tmp_path / "bench" / f"{suite}.json").read_text())["rows"]

        yield run
