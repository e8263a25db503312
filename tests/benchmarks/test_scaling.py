"""The killed rank of `benchmarks.scaling`, on the toy of the training loop over gloo."""

import argparse
import signal
import subprocess
import sys

import pytest

from benchmarks import scaling
from longtrain.training import checkpoint
from tests.training import toy

WORDS = [
    *('strategy="ddp"', "accumulate=2", "steps=8", "checkpoint_every_steps=3", "log_every=1"),
    "sleep=0.02",
]


@pytest.mark.slow
def test_a_rank_is_killed_and_the_run_that_goes_on_is_the_whole_one(tmp_path, monkeypatch):
    def command(job, words, devices, name):
        folder = tmp_path / "runs" / name / "train"
        return [sys.executable, toy.__file__, str(folder), *words, f"devices={devices}"]

    monkeypatch.setattr(scaling, "command", command)
    subprocess.run(command("train", WORDS, 2, "on-2"), check=True)
    found = scaling.killed(tmp_path, WORDS, 2, argparse.Namespace(steps=6))
    assert found["killed_rank"] == 1 and found["status"] not in (0, -signal.SIGKILL)
    same = [f"same {name}" for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER, "metrics")]
    assert all(found[name] is True for name in same)
    whole, cut = (tmp_path / "runs" / name / "train" for name in ("on-2", "killed-2"))
    (cut / "metrics.csv").write_text("step\n")
    assert scaling.compared(whole, cut) == {**{name: True for name in same}, "same metrics": False}


def test_a_process_without_such_a_rank_is_one_line():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(SystemExit, match=f"process {process.pid} has no rank 1: "):
            scaling.rank_of(process.pid, 1)
    finally:
        process.communicate(b"")
    with pytest.raises(SystemExit, match=f"process {process.pid} has no rank 1: "):
        scaling.rank_of(process.pid, 1)


def test_one_gpu_has_no_rank_to_kill(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling", "--kill", "--devices", "1"])
    with pytest.raises(SystemExit):
        scaling.main()
    assert "--kill needs a run on 2 GPUs or more, not --devices 1" in capsys.readouterr().err
