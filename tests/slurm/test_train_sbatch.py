"""`train.sbatch` as it is, over two nodes of a real Slurm: a whole run, a lost process, the time limit.

Set LONGTRAIN_SLURM_LOG=FILE to keep what the jobs logged.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtrain.assets import asset_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZE = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"]
SMALL = [
    "longspec_tiny", "quiet=true", "home=.", "trainer=cpu", "trainer.strategy=ddp", "trainer.val_every=0",
    "trainer.accumulate_grad_batches=1", "trainer.log_every=1", "callbacks.curves=false",
    "data.stages=[{fraction: 1.0, sequence_tokens: 256, doc_tokens: 256}]",
]  # fmt: skip


@pytest.fixture(scope="session")
def data(slurm_daemons: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of the recipe, prepared once."""
    from longtrain.cli import main

    home = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv", ["longtrain", "prepare", "+recipe=longspec_tiny", f"home={home}", "quiet=true"]
        )
        main()
    return home / "data"


@pytest.fixture
def job(slurm: Any, data: Path, request: pytest.FixtureRequest) -> Any:
    """`job(steps, *words)`: a job of the training script, from a folder of its own."""
    script = str(asset_dir("recipes") / "slurm" / "train.sbatch")
    shutil.copytree(data, slurm.work / "data")

    def submit(steps: int, *words: str, options: tuple[str, ...] = ("--time=10",)) -> str:
        return slurm.submit(*options, *SIZE, script, *SMALL, f"trainer.max_steps={steps}", *words)

    yield submit
    if place := os.environ.get("LONGTRAIN_SLURM_LOG"):
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(f"##### {request.node.name}\n{slurm.logs()}")


def folder(slurm: Any) -> Path:
    return slurm.work / "runs" / "longspec_tiny" / "train"


def steps_of(slurm: Any) -> list[int]:
    """The steps of metrics.csv, in its order."""
    lines = (folder(slurm) / "metrics.csv").read_text().splitlines()
    return [int(line.split(",")[lines[0].split(",").index("step")]) for line in lines[1:]]


def saved_once(slurm: Any) -> Callable[[], bool]:
    return lambda: (folder(slurm) / "checkpoints" / "last.ckpt").exists()


def log_of(slurm: Any, job: str) -> str:
    file = slurm.work / f"longtrain-train-{job}.log"
    return file.read_text() if file.exists() else ""


def test_a_whole_run_over_two_nodes(slurm: Any, job: Callable[..., str]) -> None:
    number = job(6)
    slurm.finish(number)
    assert slurm.about(number)["Restarts"] == "0"
    summary = json.loads((folder(slurm) / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["tokens"] == 6 * 2 * 256  # a row of each rank
    assert steps_of(slurm) == [1, 2, 3, 4, 5, 6]
    logs = slurm.work / f"longtrain-train-{number}"
    host = slurm.nodes[0]  # both nodes are on this machine, whose name srun gives their files
    assert {file.name for file in logs.iterdir()} == {
        f"{step}-0.{host}-{rank}.log" for step in ("dry_run", "train") for rank in (0, 1)
    }
    assert "ranks=2 nodes=2 all_reduce=gloo" in log_of(slurm, number)
    assert "step=6/6" in log_of(slurm, number) and "train done" in log_of(slurm, number)


def test_a_killed_node_is_no_end(slurm: Any, job: Callable[..., str]) -> None:
    number = job(30, "trainer.checkpoint_every_steps=5")
    slurm.wait(saved_once(slurm), number)
    killed = processes(number, slurm.nodes[1])
    assert killed
    for process in killed:
        os.kill(process, signal.SIGKILL)
    slurm.finish(number)
    assert slurm.about(number)["Restarts"] == "1"
    assert "requeued: train ended with exit code" in log_of(slurm, number)
    assert "resumed step=" in log_of(slurm, number).partition("requeued:")[2]
    assert steps_of(slurm) == list(range(1, 31))


def test_the_time_limit_is_no_end(slurm: Any, job: Callable[..., str]) -> None:
    """The limit is lowered when training has begun, since a start takes as long as it takes."""
    number = job(400, options=("--time=30", "--signal=B:USR1@60"))
    slurm.wait(lambda: " step=1/400" in log_of(slurm, number), number)
    hours, minutes, _ = slurm.about(number)["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 2  # one to two minutes from now
    slurm.call("scontrol", "update", f"JobId={number}", f"TimeLimit={limit}")
    slurm.wait(lambda: "requeued: time limit" in log_of(slurm, number), number)
    slurm.call("scontrol", "update", f"JobId={number}", "TimeLimit=30")
    slurm.wait(lambda: "resumed step=" in log_of(slurm, number), number)
    first = log_of(slurm, number).partition("requeued:")[0]
    assert "stopped by SIGUSR1 after step" in first
    assert saved_once(slurm)() and slurm.about(number)["Restarts"] == "1"


def processes(job: str, node: str) -> list[int]:
    """Ids of the Python processes that a job runs on a node."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            told = set((place / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        mine = {f"SLURM_JOB_ID={job}".encode(), f"SLURMD_NODENAME={node}".encode(), b"SLURM_LOCALID=0"}
        if mine <= told and b"train" in words:
            found.append(int(place.name))
    return found
