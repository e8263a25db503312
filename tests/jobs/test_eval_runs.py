"""Runs of `longtrain eval`: killed, resumed, cut into parts and extended, they give one result."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import yaml

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.evaluation.harness.recorded import FILE
from longtrain.evaluation.ruler.questions import DATASETS
from longtrain.evaluation.suites import SUITES
from longtrain.evaluation.suites.longbench import SPECS
from longtrain.jobs import eval as evaluation
from longtrain.jobs import eval_setup, parts
from longtrain.progress import Progress
from tests.helpers import in_a_process

TASKS = ("hotpotqa", "trec", "lcc")
ROWS = 4
UNITS = 2 * len(TASKS) * ROWS // 2
"""Of both systems together, two examples each."""
WHOLE: list[bytes] = []
RESULT = ("results.json", "examples.jsonl", "table.md")
SHIPPED = json.loads((asset_dir("recipes") / "results" / FILE).read_text())["baselines"]
"""Full-cache scores that ship: they are held against runs of today's code, so its protocol must be theirs."""


@pytest.fixture
def rows(tmp_path) -> Path:
    """Rows of three LongBench tasks with short answers."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in TASKS:
        lines = []
        for number in range(ROWS):
            row = {
                "input": f"What is number {number}?",
                "context": "It was a dark and stormy night. " * (4 + 5 * number % 7),
                "answers": ["night", str(number)],
                "length": 30,
                "dataset": name,
                "language": "en",
                "all_classes": ["night", "day"] if name == "trec" else None,
                "_id": f"{name}-{number}",
            }
            lines.append(json.dumps(row))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def overrides(rows) -> list[str]:
    return [
        "suite=longbench",
        f"suite.data={rows}",
        f"suite.tasks=[{','.join(TASKS)}]",
        "suite.batch=2",
        "suite.bootstrap=50",
        "suite.systems=[snapkv]",
        "suite.budgets=[48]",
    ]


@pytest.fixture
def run(composed, overrides, tmp_path):
    """`run(name, *changes)`: the command in this process; gives the folder of its results."""

    def go(name: str, *changes: str) -> Path:
        evaluation.run(composed("eval", *overrides, *changes, f"name={name}"))
        return tmp_path / "runs" / name / "eval" / "longbench"

    return go


@pytest.fixture
def whole(run) -> list[bytes]:
    """The result of a run from start to end; it holds no path, so one serves all tests."""
    if not WHOLE:
        WHOLE.extend(result(run("whole")))
    return WHOLE


@pytest.fixture
def command(overrides, target_folder, tmp_path):
    """`command(name, *changes)`: the same in a process of its own."""

    def start(name: str, *changes: str) -> BaseProcess:
        words = [*overrides, f"target.path={target_folder}", "target.device=cpu", f"home={tmp_path}"]
        return in_a_process(["eval", *words, *changes, f"name={name}", "quiet=true"], tmp_path)

    return start


def result(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in RESULT]


def units(folder: Path) -> int:
    """Finished units in all ledgers."""
    found = [path.read_bytes() for path in (folder / "journals").glob("*.jsonl")]
    return sum(content.count(b"\n") for content in found) - len(found)


def wait_for(process: BaseProcess, folder: Path, count: int) -> None:
    """Until so many units are finished, while the process runs."""
    end = time.monotonic() + 300
    while units(folder) < count:
        assert process.is_alive(), "it ended by itself"
        assert time.monotonic() < end, "nothing comes"
        time.sleep(0.02)


def test_a_killed_run_goes_on_and_its_result_is_that_of_a_whole_one(run, command, whole, tmp_path):
    folder = tmp_path / "runs" / "killed" / "eval" / "longbench"
    process = command("killed")
    wait_for(process, folder, 3)
    process.kill()
    process.join()
    done = units(folder)
    assert 3 <= done < UNITS and not (folder / "results.json").exists()
    (journal,) = (folder / "journals").glob("full*.jsonl")
    journal.write_bytes(journal.read_bytes() + b'{"key": "torn')
    before = {path: path.read_bytes() for path in (folder / "journals").glob("*.jsonl")}
    assert result(run("killed")) == whole
    assert units(folder) == UNITS
    for path, content in before.items():  # nothing was run again
        assert path.read_bytes().startswith(content[: content.rfind(b"\n") + 1])
    keys = [json.loads(line)["key"] for line in journal.read_text().splitlines()[1:]]
    assert len(keys) == len(set(keys)) == UNITS // 2


def test_sigterm_finishes_the_unit_and_says_how_to_go_on(run, whole, monkeypatch, tmp_path):
    advance, calls = Progress.advance, []

    def counted(self: Progress, what: str, done: int) -> None:
        advance(self, what, done)
        calls.append(what)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", counted)
        with pytest.raises(
            LongtrainError, match=r"stopped as asked at full, with 18 of 24 examples left .*on"
        ):
            run("stopped")
    assert signal.getsignal(signal.SIGTERM) is before
    assert units(tmp_path / "runs" / "stopped" / "eval" / "longbench") == len(calls) == 3
    assert result(run("stopped")) == whole


@pytest.mark.slow
def test_two_processes_here_make_the_same_result(run, whole):
    assert result(run("parts", "shards=2")) == whole


def test_a_part_gets_a_description_that_is_unpickled_without_torch(composed, overrides, monkeypatch):
    given = []
    monkeypatch.setattr(parts, "run_all", lambda work, *_, **__: given.append(work))
    more = ("method=prompt_lookup", "suite.budgets=[48]", "shards=2", "name=one")
    with pytest.raises(ConfigError, match="is not finished"):  # no part ran
        evaluation.run(composed("eval", *overrides, *more))
    (sent,) = map(pickle.dumps, given)
    code = (
        "import pickle, sys; work = pickle.load(sys.stdin.buffer); "
        "print(work.args[0].suite.name, work.args[1], 'torch' in sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert made.stdout.split() == [b"longbench", b"2", b"False"]
    assert pickle.loads(sent).args == given[0].args


def test_parts_one_by_one_and_a_merge(run, whole, caplog):
    caplog.set_level("INFO")
    folder = run("parts", "shards=3", "shard=2")
    assert not (folder / "results.json").exists()
    assert "part=2 of=3 done" in caplog.text
    with pytest.raises(ConfigError, match=r"not finished \(full: \d+ examples, snapkv@48: \d+ examples left"):
        run("parts", "shards=3", "shard=merge")
    run("parts", "shards=3", "shard=0")
    assert result(run("parts", "shards=3", "shard=1")) == whole  # the last one merges
    (folder / "results.json").unlink()
    assert result(run("parts", "shards=3", "shard=merge")) == whole


@pytest.mark.slow
def test_a_part_that_fails_is_named_with_its_reason(run):
    with pytest.raises(LongtrainError, match=r"part \d of 2 failed: .*unknown eviction policy 'snap'"):
        run("parts", "shards=2", "suite.systems=[snap]")


def test_gpus_are_dealt_out_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen = []
    for number in range(3):
        with parts.environment(number, 3, "cuda"):
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["3", "5", "3"]
    with parts.environment(0, 2, "cpu"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5" and int(os.environ["OMP_NUM_THREADS"]) >= 1
    assert "OMP_NUM_THREADS" not in os.environ


def test_files_and_what_is_in_them(run, capsys):
    folder = run("one", "report=html")
    names = {path.name for path in folder.iterdir()}
    assert {*RESULT, "timings.json", "report.html", "config.yaml", "provenance.json", "journals"} <= names
    found = json.loads((folder / "results.json").read_text())
    assert found["title"].startswith("Variant of LongBench")
    assert [system["name"] for system in found["systems"]] == ["full", "snapkv@48"]
    assert str(folder.parent.parent) not in (folder / "results.json").read_text()
    assert "_s" not in {key[-2:] for key in found["systems"][0]}
    lines = [json.loads(line) for line in (folder / "examples.jsonl").read_text().splitlines()]
    assert [line["example"] for line in lines] == [
        f"{t}-{i}" for t in SPECS if t in TASKS for i in range(ROWS)
    ]
    assert all(set(line["outputs"]) == {"full", "snapkv@48"} for line in lines)
    times = json.loads((folder / "timings.json").read_text())
    assert all(task["output_tokens"] > 0 for system in times["systems"] for task in system["tasks"])
    assert json.loads((folder / "provenance.json").read_text())["protocol"] == found["protocol"]["hash"]
    assert "Variant of LongBench" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("report=pdf", ConfigError, r"report=pdf; allowed: html, or null"),
        ("shards=0", ConfigError, r"shards=0; allowed: a whole number, 1 or more"),
        ("shard=1", ConfigError, r"shard=1 shards=1; allowed: 0 to 0, merge"),
        ("shard=all", ConfigError, r"shard=all; allowed: a whole number"),
        ("suite.batch=0", ConfigError, r"suite\.batch=0; allowed: a whole number, 1 or more"),
        ("suite.bootstrap=no", ConfigError, r"suite\.bootstrap=False|suite\.bootstrap=no"),
        ("suite.systems=snapkv", ConfigError, r"suite\.systems=snapkv; allowed: a list"),
        ("suite.budgets=[64,0.1]", ConfigError, r"suite\.budgets=\[64, 0\.1\]; allowed"),
        ("suite.shapes=[4]", ConfigError, r"suite\.shapes=\[4\]; allowed: a list, each a list"),
        (
            "suite.check_baseline=perhaps",
            ConfigError,
            r"suite\.check_baseline=perhaps; allowed: true or false",
        ),
        ("decode.temperature=-1", ConfigError, r"decode.temperature=-1; allowed"),
    ],
)
def test_wrong_settings_are_one_clear_error_and_write_nothing(run, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        run("one", change)
    assert not list(tmp_path.glob("runs/*/eval/*/journals/*.jsonl"))


def test_a_row_with_a_missing_field_is_named(run, rows, tmp_path):
    lines = (rows / "trec.jsonl").read_text().splitlines()
    values = json.loads(lines[3])
    del values["answers"]
    lines[3] = json.dumps(values)
    (rows / "trec.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"trec\.jsonl.*4.*answers|answers.*trec\.jsonl.*4"):
        run("one")


def test_a_folder_of_another_protocol_loses_nothing(run):
    folder = run("one")
    outputs = result(folder)
    with pytest.raises(
        ConfigError, match=r"protocol\.decoding\.seed=0, and .*seed=1 is asked for; pass name="
    ):
        run("one", "seed=1")
    assert result(folder) == outputs
    with pytest.raises(ConfigError, match=r"protocol\.tasks\.hotpotqa\.rows=4, and .*=2 is asked for"):
        run("one", "suite.limit=2")
    assert result(run("one")) == outputs


def test_every_key_of_a_harness_suite_is_read():
    """A key that nothing knows would be a promise that is not kept."""
    import inspect

    from longtrain.evaluation import suites

    folder = Path(inspect.getfile(suites)).parent
    shared = "".join(path.read_text() for path in folder.glob("*.py"))
    job = Path(inspect.getfile(evaluation)).read_text() + Path(inspect.getfile(eval_setup)).read_text()
    files = {path.stem: yaml.safe_load(path.read_text()) for path in asset_dir("conf").glob("suite/*.yaml")}

    def settings(stem: str) -> dict:
        """A file's keys over those of the ones that it builds on."""
        bases = (settings(base) for base in files[stem].get("defaults", []) if base in files)
        return {key: value for keys in (*bases, files[stem]["suite"]) for key, value in keys.items()}

    seen = set()
    for stem in files:
        found = settings(stem)
        if found.get("name") in SUITES:
            seen.add(found["name"])
            importlib.import_module(SUITES[found["name"]])
            for key in found:
                named = re.search(rf'"{key}"|\b{key}: |suite\.{key}\b', shared + job)
                assert named or key in DATASETS, (stem, key)
    assert seen == set(SUITES), f"suites without a file in conf/suite: {set(SUITES) - seen}"


@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry["suite"])
def test_the_command_of_a_shipped_score_has_its_protocol(composed, entry, monkeypatch):
    sessions = []
    monkeypatch.setattr(evaluation, "measure", lambda session, *_: sessions.append(session))
    words = shlex.split(entry["source"])[2:]
    (name,) = (word.removeprefix("target=") for word in words if word.startswith("target="))
    evaluation.run(composed("eval", *words, f"target.path={name}"))
    (session,) = sessions
    assert session.protocol.settings == entry["protocol"]
    assert session.baseline is not None and session.baseline["score"] == entry["score"]


def test_progress_counts_what_was_done_before(caplog, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level("INFO")
    with Progress(10, 4, every_s=0.0) as bar:
        bar.advance("full · qasper", 2)
        bar.add(5, 1)
        bar.advance("full · trec", 2)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "to do: examples=10 done_before=4"
    assert "full · qasper: examples=6 of=10 left_s=" in lines[1]
    assert "full · trec: examples=9 of=15 left_s=" in lines[2]


def test_the_number_of_examples_is_told_before_the_first_is_done(caplog, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level("INFO")
    with Progress(10, 0, "timed prompts"), Progress(0, 0):
        pass
    assert [record.getMessage() for record in caplog.records] == ["to do: timed_prompts=10"]


def test_the_bar_starts_where_the_earlier_run_ended(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(10, 4) as bar:
        (shown,) = bar._bar.tasks
        assert (shown.completed, shown.total) == (4, 10)
        bar.advance("full · qasper", 3)
        assert (shown.completed, shown.description) == (7, "full · qasper")
