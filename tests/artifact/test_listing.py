"""`longtrain list`: artifacts, runs and evaluations in a line each, from their files alone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longtrain.files import json_sha256, sealed

WEIGHTS = b"weights"
SUM = hashlib.sha256(WEIGHTS).hexdigest()
FULL = {
    "name": "full",
    "kind": "full",
    "facts": {},
    "average": {"value": 1.0, "low": 1.0, "high": 1.0},
    "tasks": [],
}
DRAFT = {
    "name": "one chain 4",
    "kind": "artifact",
    "facts": {"artifacts": [{"artifact": "one", "method": "longspec", "weights": SUM}]},
    "average": {"value": 1.8, "low": 1.7, "high": 1.9},
    "tasks": [{"exactness": {"compared": 24, "different": 1}}, {"exactness": None}],
}


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    train, suite, made = (
        tmp_path / "runs/one/train",
        tmp_path / "runs/one/eval/acceptance",
        tmp_path / "checkpoints/one",
    )
    write(train / "config.yaml", "method: {name: longspec}\ntarget: {path: tiny}\n")
    write(train / "provenance.json", {"time_utc": "2026-01-02T03:04:05+00:00"})
    write(train / "summary.json", {"steps": 7, "final_loss": 1.25, "final": {"val/loss": 1.5}})
    scale = {"name": "acceptance length"}
    results = {"suite": "acceptance", "scale": scale, "target": {"name": "tiny"}, "systems": [FULL, DRAFT]}
    write(suite / "results.json", sealed(results).decode())
    write(suite / "provenance.json", {"time_utc": "2026-01-02T05:04:05+00:00"})
    manifest = {
        "method": "longspec",
        "target": {"name": "tiny"},
        "golden": {"dtype": "float32"},
        "files": {"model.safetensors": SUM},
        "provenance": {
            "time_utc": "2026-01-02T03:04:05+00:00",
            "export": {"time_utc": "2026-01-02T04:04:05+00:00"},
        },
    }
    write(made / "longtrain.json", {**manifest, "sha256": json_sha256(manifest)})
    (made / "model.safetensors").write_bytes(WEIGHTS)
    return tmp_path


@pytest.mark.parametrize("word", ["list", "inspect"])
def test_everything_has_a_line(word: str, home: Path, run) -> None:
    done = run(word)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and not done.stderr
    figure = "acceptance length 1.80 [1.70, 1.90] (one chain 4)"
    assert (
        f"one longspec tiny 2026-01-02 04:04 files yes; golden outputs in float32 {figure}, suite acceptance"
        in lines
    )
    assert "one longspec tiny 2026-01-02 03:04 step 7, loss 1.250, val_loss 1.500" in lines
    assert f"one/acceptance longspec tiny 2026-01-02 05:04 23/24 texts the same {figure}" in lines


def test_the_main_figure_is_that_of_an_artifact(home: Path, run) -> None:
    file = home / "runs/one/eval/acceptance/results.json"
    results = json.loads(file.read_text())
    baseline = {**DRAFT, "name": "baseline", "facts": {}, "tasks": []}
    write(file, sealed({**results, "systems": [FULL, DRAFT, baseline]}).decode())
    lines = run("list").stdout.splitlines()
    assert (
        next(line for line in lines if line.startswith(" one/acceptance")).rstrip().endswith("(one chain 4)")
    )


def test_a_name_with_folders_in_it_is_listed_too(home: Path, run) -> None:
    for kind in ("runs", "checkpoints"):
        (home / kind / "q").mkdir()
        (home / kind / "one").rename(home / kind / "q" / "sub")
    (home / "runs/q/sub/train/checkpoints").mkdir()
    (home / "runs/q/eval/generated/train").mkdir(parents=True)  # a folder of that name that is no training
    lines = [line.split()[0] for line in run("list").stdout.splitlines() if " longspec " in line]
    assert lines == ["q/sub", "q/sub", "q/sub/acceptance"]


def test_what_is_damaged_or_unfinished_is_told_in_its_line(home: Path, run) -> None:
    (home / "checkpoints/one/model.safetensors").write_bytes(b"other")
    write(home / "checkpoints/two/longtrain.json", "{")
    (home / "runs/one/train/summary.json").unlink()
    write(home / "runs/one/eval/acceptance/results.json", {})
    done = run("list")
    assert done.returncode == 0
    assert "NO: model.safetensors was changed" in done.stdout and "not evaluated" in done.stdout
    assert (
        "NO: longtrain.json cannot be read" in done.stdout
        and "NO: results.json cannot be read" in done.stdout
    )
    assert "not finished; the same command goes on" in done.stdout


def test_an_edited_manifest_is_told(home: Path, run) -> None:
    file = home / "checkpoints/one/longtrain.json"
    write(file, {**json.loads(file.read_text()), "method": "specontext"})
    assert "NO: longtrain.json was changed" in run("list").stdout


def test_edited_results_are_told(home: Path, run) -> None:
    file = home / "runs/one/eval/acceptance/results.json"
    write(file, {**json.loads(file.read_text()), "systems": [FULL, {**DRAFT, "average": FULL["average"]}]})
    done = run("list")
    assert done.returncode == 0 and "NO: results.json cannot be read" in done.stdout


@pytest.mark.parametrize("content", ["[" * 50_000, "- a", "method: {name: '${nope}'}", "pipe", "\xff"])
def test_a_damaged_configuration_is_no_reason_to_stop(home: Path, content: str, run) -> None:
    file = home / "runs/one/train/config.yaml"
    file.unlink()
    if content == "pipe":
        os.mkfifo(file)
    else:
        file.write_text(content, encoding="latin-1")
    done = run("list")
    assert done.returncode == 0 and "step 7, loss 1.250" in " ".join(done.stdout.split())


def test_nothing_yet_is_said_with_a_first_command(run) -> None:
    done = run("list")
    assert done.returncode == 0 and "begin: longtrain +recipe=quickstart" in done.stdout


def test_it_loads_no_torch(home: Path, root: Path) -> None:
    code = "import sys; sys.argv = ['longtrain', 'list']; from longtrain.cli import main; main()"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=home,
        env={"PYTHONPATH": str(root)},
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"
