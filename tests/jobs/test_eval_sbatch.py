"""What the SLURM script starts, alone and as an array's task."""

from __future__ import annotations

import os
import subprocess

import pytest

from longtrain.assets import asset_dir

RECIPE = ["quickstart", "suite=longbench"]


@pytest.fixture
def started(tmp_path):
    """`started(*words, **environment)`: the words that srun would get."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)

    def run(*words: str, **environment: str) -> list[str]:
        script = asset_dir("recipes") / "slurm" / "eval.sbatch"
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
        found = subprocess.run(["bash", script, *words], capture_output=True, text=True, check=True, env=env)
        return found.stdout.splitlines()

    return run


def test_alone_it_exports_and_evaluates(started):
    want = ["python", "-m", "longtrain", "job=[export,eval]", "+recipe=quickstart", "suite=longbench"]
    assert started(*RECIPE) == want


def test_an_arrays_task_is_a_part(started):
    array = {"SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "3"}
    words = started(*RECIPE, **array)
    assert words == [
        "python", "-m", "longtrain", "eval", "shards=3", "shard=2", "+recipe=quickstart", "suite=longbench",
    ]  # fmt: skip
