"""What the SLURM script starts, alone and as an array's task."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from longtrain.assets import asset_dir
from longtrain.data.chat.prompts import Answers
from longtrain.evaluation.harness.results_journal import ResultsJournal

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


@pytest.fixture
def requeued(tmp_path):
    """`requeued(*files, **environment)`: whether a step that writes these files and fails is tried again."""
    watched = tmp_path / "watched"
    watched.mkdir()
    programs = {
        "srun": 'for file in $WRITES; do echo line >>"$file"; done; exit 3',
        "scontrol": 'case $1 in show) echo "node1 JobState=RUNNING" ;; requeue) echo yes >requeued ;; esac',
        "sleep": "exit 0",  # a real requeue ends the script here
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    steps = asset_dir("recipes") / "slurm" / "steps.sh"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "test", "SLURM_JOB_NODELIST": "node1"}

    def run(*names: str, **environment: str) -> bool:
        writes = " ".join(str(watched / name) for name in names)
        env = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            **job,
            "WRITES": writes,
            **environment,
        }
        script = f"source {steps}; resumable {watched} -- test true"
        subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=env, cwd=tmp_path, capture_output=True)
        told = tmp_path / "requeued"
        there = told.exists()
        told.unlink(missing_ok=True)
        return there

    return run


def test_only_what_a_task_of_an_array_saved_itself_counts_as_its_progress(requeued, tmp_path):
    """Tasks of an array write beside each other: one that gains nothing must not be tried again for ever."""
    text = Path("text.answers.jsonl")
    answers = {part: Answers(tmp_path / text, {}, part=(part, 16)).path.name for part in (2, 3, 12)}
    for part in answers:
        ResultsJournal(tmp_path / "eval", f"system {part}", {}, shard=part).close()
    finished = {part: next((tmp_path / "eval").glob(f"system-{part}-*")).name for part in answers}
    others = answers[3], answers[12], finished[3], finished[12]
    assert not requeued() and not requeued(*others, SLURM_ARRAY_TASK_ID="2")
    assert requeued(*others, finished[2], SLURM_ARRAY_TASK_ID="2")
    assert requeued(answers[2], SLURM_ARRAY_TASK_ID="2")
    assert requeued(*others)  # a job that is no array's task writes them all


@pytest.mark.parametrize(("end", "lives"), [("", True), ("N/A", True), ("1 minute ago", False)])
def test_a_step_that_saves_is_ended_at_the_time_limit_only(tmp_path, end, lives):
    """A controller that does not answer gives no time, and then nothing but Slurm may end the step."""
    programs = {"scontrol": "echo node1", "scancel": "", "squeue": f"echo {end}; [[ '{end}' ]]"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = f"""
        source {asset_dir("recipes") / "slurm" / "steps.sh"}
        sleep 20 & running=$!
        leave
        [[ -z ${{timer:-}} ]] || wait "$timer"
        kill "$running" || true
        wait "$running" || [[ $? == 137 ]] || echo lives
    """
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "test", "SLURM_JOB_NODELIST": "node1"}
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **job}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert ("lives" in done.stdout) == lives, done.stderr


def test_alone_it_exports_and_evaluates(started):
    outputs = ["python", "-m", "longtrain", "job=[export,eval]", "+recipe=quickstart", "suite=longbench"]
    assert started(*RECIPE) == outputs


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
