import gzip
import json
import lzma
import os

import pytest

from longtrain.data.read.files import JSONL_SUFFIXES, TEXT_SUFFIXES, find, read_jsonl, read_text, stem
from longtrain.errors import ConfigError, DataError


def test_plain_and_packed_text_reads_the_same(tmp_path):
    text = "Größe\nzwei\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "d.pdf").write_text("no")
    files = find(str(tmp_path), TEXT_SUFFIXES)
    assert [stem(path) for path in files] == ["a", "b", "c"]
    assert {read_text(path) for path in files} == {text}
    assert find(str(tmp_path / "d.pdf"), TEXT_SUFFIXES) == [tmp_path / "d.pdf"]


def test_json_lines_and_a_json_list_read_the_same(tmp_path):
    rows = [{"text": "a"}, {"text": "b"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress((tmp_path / "a.jsonl").read_bytes()))
    for path in find(str(tmp_path), JSONL_SUFFIXES):
        assert list(read_jsonl(path)) == [(f"{path.name}:1", rows[0]), (f"{path.name}:2", rows[1])]


@pytest.mark.parametrize(
    "content,word",
    [
        ('{"a": 1}\n{"a": \n', "bad.jsonl:2"),
        ("[1, 2]", "bad.jsonl:1"),
        ("3\n", "int"),
        ('{"a": 1}\n{"a": ' + "[" * 10**5, "bad.jsonl:2 .* nested too deeply"),
        ("[" * 10**5, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, word):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=word):
        list(read_jsonl(path))


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_text(path)
    packed = tmp_path / "x.txt.xz"
    packed.write_bytes(lzma.compress(b"text" * 100)[:-8])
    with pytest.raises(DataError, match="cannot read"):
        read_text(packed)


def test_nothing_there_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no file or folder"):
        find(str(tmp_path / "none"), TEXT_SUFFIXES)
    with pytest.raises(DataError, match="holds no file"):
        find(str(tmp_path), TEXT_SUFFIXES)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is a pipe, not a regular file; pass a file or a folder"):
        find(str(tmp_path / "pipe"), TEXT_SUFFIXES)


def test_paths_may_name_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CORPUS", str(tmp_path))
    assert find("~/a.txt", TEXT_SUFFIXES) == find("$CORPUS/a.txt", TEXT_SUFFIXES) == [tmp_path / "a.txt"]
    with pytest.raises((DataError, ConfigError)):
        find("bundled:no-such-text", TEXT_SUFFIXES)
