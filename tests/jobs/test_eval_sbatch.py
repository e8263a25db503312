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
    steps = asset_dir("recipes") / "slurm" / "steps.sh"
    programs = {
        "srun": f'while [[ $1 == --* ]]; do shift; done; printf "%s\\n" "$@" >{tmp_path}/started',
        "scontrol": "echo node1",
        "python": f"if [[ $1 == -c ]]; then echo {steps}; else echo {tmp_path}/run; fi",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "test", "SLURM_JOB_NODELIST": "node1"}

    def run(*words: str, **environment: str) -> list[str]:
        script = asset_dir("recipes") / "slurm" / "eval.sbatch"
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **job, **environment}
        subprocess.run(
            ["bash", script, *words], capture_output=True, text=True, check=True, env=env, cwd=tmp_path
        )
        return (tmp_path / "started").read_text().splitlines()

    return run


def test_alone_it_exports_and_evaluates(started):
    want = ["python", "-m", "longtrain", "job=[export,eval]", "+recipe=quickstart", "suite=longbench"]
    assert started(*RECIPE) == want


@pytest.mark.parametrize("part", ["0", "2", "7"])
def test_an_arrays_task_is_the_part_of_its_number(started, part):
    """Also where only some parts are asked for anew (--array=2,5 or --array=7)."""
    array = {"SLURM_ARRAY_TASK_ID": part, "SLURM_ARRAY_TASK_MIN": part, "SLURM_ARRAY_TASK_COUNT": "1"}
    words = started(*RECIPE, "shards=8", **array, SLURM_ARRAY_TASK_STEP="1")
    assert words == [
        "python", "-m", "longtrain", "eval", f"shard={part}", "+recipe=quickstart", "suite=longbench",
        "shards=8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "array", "message"),
    [
        ([], {"ID": "3"}, "say how many there are in all, e.g. --array=0-7 and shards=8"),
        (["shards=none"], {"ID": "3"}, "say how many there are in all"),
        (["shards=8"], {"ID": "14", "STEP": "2"}, "a step of 2 leaves parts out; pass --array=0-7"),
        (["shards=8"], {"ID": "8"}, "part 8 of shards=8; parts are 0 to 7: pass --array=0-7"),
    ],
)
def test_an_array_that_would_do_other_parts_is_refused(started, words, array, message):
    with pytest.raises(subprocess.CalledProcessError) as error:
        started(*RECIPE, *words, **{f"SLURM_ARRAY_TASK_{key}": value for key, value in array.items()})
    assert error.value.returncode == 2 and message in error.value.stderr
