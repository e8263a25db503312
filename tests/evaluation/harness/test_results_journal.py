"""The journal of results: what is put is there after a kill, and nothing that was not put whole."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from longtrain.errors import ConfigError
from longtrain.evaluation.harness.results_journal import ResultsJournal, first_difference

SETTINGS = {"protocol": {"seed": 0, "tasks": {"a": {"rows": 3}}}, "target": "abc"}


def only_file(folder):
    (path,) = folder.glob("*.jsonl")
    return path


def test_what_is_put_is_read_back_by_every_shard(tmp_path):
    with ResultsJournal(tmp_path, "snapkv@64", SETTINGS, shard=0) as first:
        first.put("a", {"x": (1, 2)})
        with ResultsJournal(tmp_path, "snapkv@64", SETTINGS, shard=1) as second:
            assert second.done == {"a": {"x": [1, 2]}}
            second.put("b", {"x": []})
        assert set(first.reload()) == {"a", "b"}
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 2 and all(name.startswith("snapkv@64-") for name in names)
    assert ResultsJournal(tmp_path, "snapkv@6", SETTINGS, write=False).done == {}
    assert ResultsJournal(tmp_path, "snapkv 64", SETTINGS, write=False).done == {}


@pytest.mark.parametrize("keep", [1, 20, -1])
def test_a_torn_last_line_is_dropped_and_the_rest_goes_on(tmp_path, keep):
    with ResultsJournal(tmp_path, "full", SETTINGS) as journal:
        for key in "abc":
            journal.put(key, {"text": key * 50})
    path = only_file(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:keep])
    assert set(ResultsJournal(tmp_path, "full", SETTINGS, write=False).done) == {"a", "b"}
    with ResultsJournal(tmp_path, "full", SETTINGS) as journal:
        assert set(journal.done) == {"a", "b"}
        journal.put("c", {"text": "c" * 50})
    assert path.read_bytes() == b"".join(lines)


def test_a_torn_header_is_written_anew(tmp_path):
    with ResultsJournal(tmp_path, "full", SETTINGS):
        pass
    path = only_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:9])
    with ResultsJournal(tmp_path, "full", SETTINGS):
        pass
    assert path.read_bytes() == whole


def test_other_settings_are_refused_by_name(tmp_path):
    with ResultsJournal(tmp_path, "full", SETTINGS) as journal:
        journal.put("a", {})
    other = {**SETTINGS, "protocol": {"seed": 0, "tasks": {"a": {"rows": 4}}}}
    with pytest.raises(
        ConfigError, match=r"protocol\.tasks\.a\.rows=3, and .*=4 is asked for; pass name=OTHER"
    ):
        ResultsJournal(tmp_path, "full", other)
    with ResultsJournal(tmp_path, "full", SETTINGS) as journal:  # the refused one let go of the file
        assert set(journal.done) == {"a"}


def test_two_runs_cannot_write_one_shard(tmp_path):
    code = textwrap.dedent(f"""
        from pathlib import Path
        from longtrain.evaluation.harness.results_journal import ResultsJournal
        ResultsJournal(Path({str(tmp_path)!r}), "full", {SETTINGS!r})
    """)
    with ResultsJournal(tmp_path, "full", SETTINGS) as journal:
        journal.put("a", {})
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert found.returncode != 0 and "is being written by another run" in found.stderr
        assert set(ResultsJournal(tmp_path, "full", SETTINGS, write=False).done) == {"a"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, ("b", "2", "3")),
        ({"a": {"x": [1, 2]}}, {"a": {"x": [1, 3]}}, ("a.x.1", "2", "3")),
        ({"a": {"x": [1, 2]}}, {"a": {"x": [1]}}, ("a.x.1", "2", "none")),
        ({"a": []}, {"a": [{"b": 1}]}, ("a.0", "none", '{"b": 1}')),
        ({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}, 3]}, ("a.0.c", "2", "none")),
        ({"chat_template": "abc"}, {}, ("chat_template", '"abc"', "none")),
        ({"a": None}, {"a": "t" * 90}, ("a", "null", '"' + "t" * 56 + "...")),
    ],
)
def test_the_first_difference_is_named_in_depth(one, other, found):
    assert first_difference(one, other) == found
