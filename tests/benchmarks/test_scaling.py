"""The killed rank of `benchmarks.scaling`, on the toy of the training loop over gloo."""

import argparse
import signal
import subprocess
import sys

import pytest

from benchmarks import scaling
from longtrain.files import read_json
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
        own = [word for word in words if word in WORDS]
        return [sys.executable, toy.__file__, str(folder), *own, f"devices={devices}"]

    monkeypatch.setattr(scaling, "command", command)
    found = scaling.killed(tmp_path, WORDS, 2, argparse.Namespace(steps=6, timeout=120))
    assert found["killed_rank"] == 1 and found["status"] not in (0, -signal.SIGKILL)
    same = [f"same {name}" for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER, "metrics")]
    assert all(found[name] is True for name in same)
    whole, cut = (tmp_path / "runs" / name / "train" for name in ("whole-2", "killed-2"))
    (cut / "metrics.csv").write_text("step\n")
    assert scaling.compared(whole, cut) == {**{name: True for name in same}, "same metrics": False}


def test_a_process_without_such_a_rank_is_one_line():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(scaling.RunError, match=f"process {process.pid} has no rank 1: "):
            scaling.rank_of(process.pid, 1)
    finally:
        process.communicate(b"")
    with pytest.raises(scaling.RunError, match=f"process {process.pid} has no rank 1: "):
        scaling.rank_of(process.pid, 1)


def test_one_gpu_has_no_rank_to_kill(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling", "--kill", "--devices", "1"])
    with pytest.raises(SystemExit):
        scaling.main()
    assert "--kill needs a run on 2 GPUs or more, not --devices 1" in capsys.readouterr().err


def run(monkeypatch, folder, *words):
    """`python -m benchmarks.scaling`; returns what the file has."""
    monkeypatch.setattr(
        sys, "argv", ["scaling", "--shape", "tiny", "--tokens", "8", "--folder", str(folder), *words]
    )
    scaling.main()
    return read_json(folder / "scaling.json")


def test_a_run_that_fails_loses_no_figures_and_a_second_call_adds_what_is_missing(
    tmp_path, monkeypatch, capsys
):
    made = []

    def measured(place, words, devices, asked):
        made.append(devices)
        if len(made) == 2:
            raise scaling.RunError("status 1 of longtrain train")
        return {
            "devices": devices,
            "losses": [4.0, 2.0 + devices],
            "stages": [{"tokens_per_s": 3.0 * devices}],
        }

    monkeypatch.setattr(scaling, "measured", measured)
    with pytest.raises(SystemExit, match="1 runs failed; the others are in "):
        run(monkeypatch, tmp_path, "--devices", "4", "2", "1")
    found = read_json(tmp_path / "scaling.json")
    assert found["failed"] == [{"devices": 2, "error": "status 1 of longtrain train"}]
    assert [one["devices"] for one in found["runs"]] == [1, 4]
    found = run(monkeypatch, tmp_path, "--devices", "4", "2", "1")
    assert made == [4, 2, 1, 2] and found["failed"] == []
    assert [one["stages"][0]["speedup"] for one in found["runs"]] == [1, 2, 4]
    assert all(one["provenance"]["argv"][0] == "scaling" for one in found["runs"])
    differences = [one["largest_relative_difference_of_a_loss"] for one in found["runs"]]
    assert differences == pytest.approx([0, 1 / 3, 1])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "scaling.json").write_text("{}")  # of a version that wrote no settings
    for folder, words in ((tmp_path, ("--steps", "7")), (tmp_path / "old", ())):
        with pytest.raises(SystemExit):
            run(monkeypatch, folder, *words)
        assert "of other settings" in capsys.readouterr().err


def test_a_run_that_does_not_end_is_killed_and_named():
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(scaling.RunError, match=r"no end after 0.2 s, killed: .*time.sleep"):
        scaling.ran(words, 0.2)
