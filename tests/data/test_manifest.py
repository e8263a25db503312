from dataclasses import replace

import pytest

from longtrain.data.read.manifest import Manifest, Part, resolve, rows
from longtrain.errors import ConfigError, DataError


def test_parts_share_what_stands_above_them():
    manifest = Manifest.load("prolong64k")
    assert [part.kind for part in manifest.parts] == ["book", "code", "paper", "chat"]
    assert {part.hub for part in manifest.parts} == {"princeton-nlp/prolong-data-64K"}


def test_an_unknown_manifest_lists_the_known():
    with pytest.raises(ConfigError, match=r"known: .*slimpajama"):
        Manifest.load("slimpyjama")


@pytest.mark.parametrize(
    "text,word",
    [
        ("hub: a/b\nadapter: text\n", "licence"),
        ("hub: a/b\nlicence: x\nadapter: csv\n", "csv"),
        ("hub: a/b\nlicence: x\nadapter: text\ncolour: red\n", "colour"),
        ("hub: a/b\nlicence: x\nadapter: text\nformat: mds\n", "files"),
        ("hub: a/b\nlicence: x\nadapter: text\nshuffle_buffer: -1\n", "shuffle_buffer=-1"),
    ],
)
def test_mistakes_in_a_manifest_are_named(tmp_path, text, word):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        Manifest.load(str(path))


def test_a_commit_is_taken_as_it_is_and_a_branch_needs_the_hub(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert resolve(Part("a/b", "x", "text", revision=commit)) == commit
    part = Part("nobody/nothing-here", "x", "text")
    with pytest.raises(DataError, match=r"nobody/nothing-here.*data\.text=PATH"):
        resolve(part)
    assert resolve(part, known=commit) == commit


def test_rows_of_a_dataset_are_streamed(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    part = Part(str(tmp_path), "x", "text", files=(str(tmp_path / "train.jsonl"),))
    assert [row["text"] for _, row in rows(part, "main", 2)] == ["a", "b"]
    (tmp_path / "train.jsonl").write_text("".join(f'{{"text": "{i:02}"}}\n' for i in range(40)))
    drawn = [row["text"] for _, row in rows(replace(part, shuffle_buffer=20), "main", None)]
    assert sorted(drawn) == [f"{i:02}" for i in range(40)] != drawn
    assert [row["text"] for _, row in rows(replace(part, shuffle_buffer=20), "main", 5)] == drawn[:5]
    with pytest.raises(DataError, match="test"):
        list(rows(Part(str(tmp_path), "x", "text", split="test"), "main", 2))
