"""Rows and settings of suites: local files, files and data sets of the Hub, and what is wrong with them."""

from __future__ import annotations

import gzip
import importlib
import inspect
import json

import huggingface_hub
import pytest

from longtrain.assets import asset_dir
from longtrain.data.read.files import local_file
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.suites import SUITES, shared
from longtrain.evaluation.suites.shared import existing_file, read_rows

FIELDS = {"name": (str,), "age": (int, type(None))}
ROWS = [{"name": "a", "age": 1, "more": []}, {"name": "b", "age": None}]


def test_rows_of_local_files(tmp_path) -> None:
    lines, whole, packed = (tmp_path / name for name in ("a.jsonl", "a.json", "a.jsonl.gz"))
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    lines.write_text(text)
    whole.write_text(json.dumps(ROWS))
    packed.write_bytes(gzip.compress(text.encode()))
    assert all(read_rows(str(file), "people", FIELDS) == ROWS for file in (lines, whole, packed))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"age": 1}, r"a.jsonl:2: field 'name' is missing, there are age; an example of people has"),
        ({"name": "c", "age": "1"}, r"/a.jsonl:2: field 'age' is a str; it must be int or null: correct"),
        ({"name": "c", "age": True}, r"a.jsonl:2: field 'age' is a bool"),
        ([], r"a.jsonl:2 holds a list"),
    ],
)
def test_wrong_rows_are_named(tmp_path, row, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row))
    with pytest.raises(DataError, match=message):
        read_rows(str(file), "people", FIELDS)


def test_rows_of_a_data_set_on_the_hub(monkeypatch) -> None:
    asked = []

    def stream(part, commit, limit):
        asked.append((part.hub, part.split, part.config, commit, limit))
        return iter([("x#0", ROWS[0])])

    monkeypatch.setattr(shared, "resolve", lambda part: "c0ffee")
    monkeypatch.setattr(shared, "rows", stream)
    assert read_rows("some/people", "people", FIELDS) == ROWS[:1]
    assert asked == [("some/people", "train", None, "c0ffee", None)]


def test_a_file_of_the_hub(monkeypatch, tmp_path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(ROWS[0]))

    def fetch(repo, name, *, repo_type):
        assert (repo, name, repo_type) == ("some/people", "data/a.jsonl", "dataset")
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert local_file("hub:some/people/data/a.jsonl") == file
    assert read_rows("hub:some/people/data/a.jsonl", "people", FIELDS) == ROWS[:1]


def test_what_is_not_there() -> None:
    with pytest.raises(DataError, match="data set some/people could not be read from the Hub"):
        read_rows("some/people", "people", FIELDS)
    with pytest.raises(DataError, match=r"b.jsonl of data set some/people could not be fetched"):
        read_rows("hub:some/people/b.jsonl", "people", FIELDS)
    with pytest.raises(ConfigError, match="'hub:people' names no file of a data set"):
        read_rows("hub:people", "people", FIELDS)
    with pytest.raises(ConfigError, match=r"people data at /nowhere/at.all: no file and no Hub id"):
        read_rows("/nowhere/at.all", "people", FIELDS)
    with pytest.raises(DataError, match="essays: nothing at /nowhere"):
        existing_file("/nowhere", "essays")


def test_every_suite_has_its_module_and_its_configuration() -> None:
    for name, module in SUITES.items():
        build = inspect.signature(importlib.import_module(module).build)
        assert list(build.parameters) == ["settings", "target", "seed", "sampling"]
        texts = [file.read_text() for file in (asset_dir("conf") / "suite").glob("*.yaml")]
        assert any(f"  name: {name}\n" in text for text in texts), f"no file of conf/suite names {name}"
