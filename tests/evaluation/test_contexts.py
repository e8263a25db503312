from __future__ import annotations

import gzip
import lzma
from collections import Counter

import numpy as np
import pyarrow
import pytest

from longtrain.assets import asset_dir
from longtrain.data.packing.prepared import Prepared, PreparedWriter
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.corpora import (
    HeldOutText,
    documents_from_files,
    documents_from_prepared,
    has_held_out,
    prefix_of,
    read_texts,
)
from longtrain.evaluation.suites.continuation import choose_points, texts_of
from longtrain.settings import parse_tokens


class Bytes:
    """A tokenizer of bytes that may begin every text with token 256."""

    def __init__(self, begin=False):
        self.begin = begin

    def __call__(self, text, add_special_tokens=True, **_):
        ids = list(text.encode())
        return type("Encoding", (), {"input_ids": [256, *ids] if self.begin and add_special_tokens else ids})


def documents(*lengths, kind="book"):
    return [HeldOutText(f"{kind}{i}", kind, np.arange(n) % 251) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(("text", "count"), [("512", 512), (300, 300), ("1.5K", 1536), ("1m", 1 << 20)])
def test_lengths_are_parsed(text, count):
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["k", "-1", "0", "1.3", "lots", ""])
def test_lengths_that_are_none(text):
    with pytest.raises(ConfigError, match="is no token count; allowed: 512, 1k"):
        parse_tokens(text)


def test_every_length_ends_at_the_same_point():
    point = choose_points(documents(1000), longest=400, count=1).points[0]
    long, short = point.prompt(400), point.prompt(50)
    assert len(long) == 400 and long[-50:] == short
    assert short[-1] == (point.end - 1) % 251


def test_a_prefix_takes_the_place_of_the_first_tokens():
    point = choose_points(documents(500), longest=100, count=1).points[0]
    assert point.prompt(100, [7])[0] == 7
    assert point.prompt(100, [7])[1:] == point.prompt(100)[1:]
    assert prefix_of(Bytes(begin=True)) == [256] and prefix_of(Bytes()) == []


def test_points_leave_room_on_both_sides_and_are_apart():
    found = choose_points(documents(700, 3000), longest=400, count=30, margin=100, seed=5)
    for point in found.points:
        assert 400 <= point.end <= len(point.document.ids_T) - 100
    ends = sorted(point.end for point in found.points if point.document.name == "book1")
    assert len(ends) == len(set(ends))
    assert min(ends) < 700 and max(ends) > 2500


def test_points_are_spread_over_kinds_and_documents():
    texts = documents(5000, 5000, 5000) + documents(5000, kind="code")
    found = choose_points(texts, longest=100, count=24)
    assert Counter(point.document.kind for point in found.points) == {"book": 12, "code": 12}
    assert set(Counter(point.document.name for point in found.points).values()) == {4, 12}


def test_points_are_the_same_for_one_seed_only():
    def ends(seed):
        return [point.end for point in choose_points(documents(9000), longest=100, count=5, seed=seed).points]

    assert ends(1) == ends(1) != ends(2)


def test_what_cannot_be_had_is_counted():
    found = choose_points(documents(300, 1000, 1100), longest=900, count=50, margin=64)
    assert found.dropped["documents shorter than 964 tokens"] == 1
    assert found.dropped["prompts beyond what the held-out text gives"] == 50 - len(found.points) > 0
    with pytest.raises(DataError, match=r"longest has 1100; pass shorter"):
        choose_points(documents(300, 1100), longest=2000, count=1)


def test_files_without_a_kind_are_used_where_no_file_is_of_the_kinds_wanted(tmp_path, caplog):
    (tmp_path / "notes.txt").write_text("plain words")
    with caplog.at_level("INFO"):
        (found,) = read_texts(tmp_path, kinds=["book"])
    assert found == ("notes", "text", "plain words") and "carry no kind and are used" in caplog.text
    (tmp_path / "book-emma.txt").write_text("Emma")
    assert [name for name, _, _ in read_texts(tmp_path, kinds=["book"])] == ["book-emma"]


def test_files_become_documents_with_kinds(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "emma.txt").write_text("abc")
    (tmp_path / "code_sorting.txt").write_text("def")
    (tmp_path / "tool.py").write_text("x = 1")
    found = documents_from_files(tmp_path, Bytes())
    assert [(doc.name, doc.kind) for doc in found] == [
        ("emma", "book"),
        ("code_sorting", "code"),
        ("tool", "code"),
    ]
    assert found[0].ids_T.tolist() == [97, 98, 99]
    (tmp_path / "notes.txt").write_text("n")
    assert documents_from_files(tmp_path / "notes.txt", Bytes())[0].kind == "text"
    assert documents_from_files(tmp_path / "notes.txt", Bytes(), prose="book")[0].kind == "book"
    assert [doc.name for doc in documents_from_files(tmp_path, Bytes(), kinds=["book"])] == ["emma"]
    assert documents_from_files(tmp_path / "tool.py", Bytes())[0].kind == "code"


def test_hidden_files_and_byte_order_marks_are_no_text(tmp_path):
    (tmp_path / "._a.txt").write_bytes(b"\x00\x05\x16\x07")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a.txt").write_text("old")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    (found,) = documents_from_files(tmp_path, Bytes())
    assert found.ids_T.tolist() == [97, 98, 99]


def test_files_that_are_missing_or_not_text(tmp_path):
    with pytest.raises(DataError, match="no held-out text at"):
        documents_from_files(tmp_path / "none", Bytes())
    with pytest.raises(DataError, match="no held-out text at"):
        documents_from_files(tmp_path, Bytes())
    (tmp_path / "book_a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"cannot read .*book_a.txt as UTF-8 text"):
        documents_from_files(tmp_path, Bytes())
    with pytest.raises(DataError, match=r"kinds there: book"):
        documents_from_files(tmp_path, Bytes(), kinds=["chat"])


def test_prepared_data_gives_its_held_out_documents(tmp_path):
    writer = PreparedWriter(tmp_path, 300)
    for name, kind, val in (("a", "book", False), ("b", "book", True), ("c", "code", True)):
        writer.add(np.full(9, ord(name)), np.ones(9), name=name, kind=kind, val=val)
    writer.close({"sources": []})
    data = Prepared.open(tmp_path)
    assert [(doc.name, doc.kind) for doc in documents_from_prepared(data)] == [("b", "book"), ("c", "code")]
    assert documents_from_prepared(data, kinds=["code"])[0].ids_T.tolist() == [ord("c")] * 9
    with pytest.raises(DataError, match="kinds: book, code"):
        documents_from_prepared(data, kinds=["chat"])
    assert has_held_out(data) and has_held_out(data, ["code", "chat"]) and not has_held_out(data, ["chat"])


def test_rows_of_json_lines_are_texts_and_files_that_are_not_read_are_told(tmp_path, caplog):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [text for _, _, text in read_texts(rows)] == ["one", "two"]
    rows.write_text('{"body": "one"}\n')
    with pytest.raises(DataError, match="no column 'text'"):
        read_texts(rows)
    (tmp_path / "emma.txt").write_text("Emma")
    assert read_texts(tmp_path) == [("emma", "text", "Emma")]
    assert "1 of its 2 files are not read" in caplog.text and "rows.jsonl" in caplog.text


def test_text_that_ships_is_named_as_training_data_names_it():
    assert read_texts("bundled:heldout") == read_texts(asset_dir("bundled") / "text" / "heldout")
    with pytest.raises(DataError, match="bundled:nothing"):
        read_texts("bundled:nothing")


def test_files_of_one_name_in_two_folders_are_two_texts(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "chapter.txt").write_text(f"of {folder}")
    assert texts_of(str(tmp_path), ()) == {"chapter": "of a", "chapter (2)": "of b"}


def test_held_out_files_may_be_packed(tmp_path):
    """As the files of `data.books` may be."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "emma.txt.gz").write_bytes(gzip.compress("Emma é".encode()))
    (tmp_path / "tool.py.xz").write_bytes(lzma.compress(b"x = 1"))
    (tmp_path / "code_a.txt.zst").write_bytes(pyarrow.Codec("zstd").compress(b"y = 2").to_pybytes())
    found = read_texts(tmp_path)
    assert found == [
        ("emma", "book", "Emma é"),
        ("code_a", "code", "y = 2"),
        ("tool", "code", "x = 1"),
    ]
    assert read_texts(tmp_path / "books" / "emma.txt.gz") == [("emma", "text", "Emma é")]
    (tmp_path / "books" / "emma.txt.gz").write_bytes(gzip.compress(b"Emma" * 99)[:-9])
    with pytest.raises(DataError, match=r"emma.txt.gz"):
        read_texts(tmp_path)
