import gzip
import json
import lzma
import os
import zlib

import pytest

from longtrain.data.read.files import (
    JSONL_SUFFIXES,
    TEXT_SUFFIXES,
    find,
    find_code,
    read_jsonl,
    read_text,
    stem,
    visible,
)
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


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, pack):
    ending = {bytes: "", gzip.compress: ".gz", lzma.compress: ".xz"}[pack]
    text, rows = tmp_path / f"a.txt{ending}", tmp_path / f"b.jsonl{ending}"
    listed, glued = tmp_path / f"c.json{ending}", tmp_path / f"d.jsonl{ending}"
    text.write_bytes(pack(BOM + "Größe".encode()))
    rows.write_bytes(pack(BOM + b'{"text": "one"}\n{"text": "two"}\n'))
    listed.write_bytes(pack(BOM + b'[{"text": "one"}, {"text": "two"}]'))
    glued.write_bytes(pack((BOM + b'{"text": "one"}\n') * 2))  # cat a.jsonl b.jsonl
    assert read_text(text) == "Größe"
    for path in (rows, listed):
        assert [row["text"] for _, row in read_jsonl(path)] == ["one", "two"]
    assert [row["text"] for _, row in read_jsonl(glued)] == ["one", "one"]


def test_hidden_files_are_no_text(tmp_path):
    for name in ("a.txt", "._a.txt", ".b.txt", ".ipynb_checkpoints/a.txt", "deep/.git/c.txt", "deep/d.txt"):
        (tmp_path / "of.mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "of.mine" / name).write_bytes(b"\x00\x05\x16\x07")
    found = find(str(tmp_path / "of.mine"), TEXT_SUFFIXES)
    assert [path.relative_to(tmp_path / "of.mine").as_posix() for path in found] == ["a.txt", "deep/d.txt"]
    deep = tmp_path / "of.mine" / "deep" / ".git"
    assert find(str(deep), TEXT_SUFFIXES) == [deep / "c.txt"], "a folder that is named is read"
    (tmp_path / "of.mine" / "e" / ".f").mkdir(parents=True)
    with pytest.raises(DataError, match=r"e holds no file ending in .*hidden files do not count"):
        find(str(tmp_path / "of.mine" / "e"), TEXT_SUFFIXES)


def test_what_is_not_read_of_a_folder_is_told(tmp_path, caplog):
    for name in ("a.txt", "B.TXT", "c.Md.XZ", "LICENSE", "page.html", ".hidden.txt"):
        (tmp_path / name).write_bytes(lzma.compress(b"packed") if name.endswith("XZ") else b"plain")
    found = find(str(tmp_path), TEXT_SUFFIXES)
    assert [path.name for path in found] == ["B.TXT", "a.txt", "c.Md.XZ"]
    assert [read_text(path) for path in found] == ["plain", "plain", "packed"]
    assert [stem(path) for path in found] == ["B", "a", "c"]
    assert (
        "2 of its 5 files are not read, since they do not end in .txt, .md, .rst, .py: LICENSE, ..."
        in caplog.text
    )


@pytest.mark.parametrize(
    ("name", "suffixes", "says"),
    [
        ("chats.jsonl", TEXT_SUFFIXES, "chats.jsonl .* read by data=conversations data.conversations={0}"),
        ("a.md", JSONL_SUFFIXES, "a.md .* are read by data=text data.text={0}"),
        ("a.rs", TEXT_SUFFIXES, "a.rs .* are read by data=code data.code={0}"),
    ],
)
def test_a_folder_of_other_files_says_which_data_reads_them(tmp_path, name, suffixes, says):
    (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=says.format(tmp_path)):
        find(str(tmp_path), suffixes)


def test_json_lines_as_text_are_told(tmp_path, caplog):
    file = tmp_path / "chats.jsonl"
    file.write_text("{}")
    assert find(str(file), JSONL_SUFFIXES) == [file] and not caplog.text
    assert find(str(file), TEXT_SUFFIXES) == [file]
    assert "is read as running text, JSON and all; its rows are read by data=conversations" in caplog.text


def test_what_a_folder_of_code_is_is_decided_without_what_is_not_source(tmp_path, caplog):
    names = ["a.py", "lib/b.c", ".vscode/x.jsonl", ".vscode/y.jsonl", "node_modules/p/z.jsonl"]
    names += ["node_modules/p/q.js", "node_modules/r.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")

    def found():
        return [path.relative_to(tmp_path).as_posix() for path in find_code(str(tmp_path))]

    assert found() == ["a.py", "lib/b.c"] and not caplog.text
    (tmp_path / "lib" / "fixture.jsonl").write_text("{}")
    assert found() == ["a.py", "lib/b.c"]
    assert "is read as a source tree of 2 files; its 1 files of JSON lines (lib/fixture.jsonl" in caplog.text
    for name in ("lib/b.c", "package.json", "rows.jsonl.xz"):
        (tmp_path / name).unlink(missing_ok=True) if name == "lib/b.c" else (tmp_path / name).write_text("{}")
    assert found() == ["lib/fixture.jsonl", "package.json", "rows.jsonl.xz"]
    assert "its 1 source files (a.py, ...) are not read" in caplog.text


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "a\\ud83d\\ud83db"])
def test_half_a_character_is_told_of_by_its_row(tmp_path, half):
    rows = ['{"text": "\\ud83d\\ude00 \\u00fc"}', f'{{"text": "{half}"}}', '{"text": "last"}']
    lines, listed = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text("\n".join(rows))
    listed.write_text(f"[{','.join(rows)}]")
    for path in (lines, listed):
        with pytest.raises(DataError, match=rf"{path.name}:2 holds \\ud.*half of a character"):
            list(read_jsonl(path))
        told = []
        assert [row["text"] for _, row in read_jsonl(path, told.append)] == ["😀 ü", "last"]
        assert len(told) == 1


def damaged_deflate(content):
    """A .gz file whose data go on with a block of a kind that there is not."""
    begun = zlib.compressobj(wbits=31)
    return begun.compress(content) + begun.flush(zlib.Z_FULL_FLUSH) + b"\xff" * 8


@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        (".gz", damaged_deflate),
        (".gz", lambda content: gzip.compress(content)[:-9]),
        (".xz", lambda content: lzma.compress(content)[:-20]),
    ],
)
def test_a_damaged_archive_is_named_and_what_comes_before_is_read(tmp_path, ending, pack):
    content = "".join(f'{{"text": "{number * 7919 % 100003}"}}\n' for number in range(40_000)).encode()
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(pack(content))
    with pytest.raises(DataError, match=rf"cannot read .*rows\.jsonl\{ending}: .*leave out the file"):
        list(read_jsonl(path))
    told = []
    rows = [row for _, row in read_jsonl(path, told.append)]
    assert 0 < len(rows) <= 40_000 and rows[0] == {"text": "0"} and len(told) == 1
    with pytest.raises(DataError, match=rf"cannot read .*rows\.jsonl\{ending} as UTF-8 text"):
        read_text(path)


def test_a_line_in_another_encoding_costs_that_line_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "gr\xf6\xdfe"}\n' + b'{"text": "three"}\n' * 1000)
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not JSON \(.*utf-8"):
        list(read_jsonl(path))
    told = []
    assert len(list(read_jsonl(path, told.append))) == 1001 and len(told) == 1


def test_a_file_name_that_is_not_utf8_is_shown_with_marks(tmp_path):
    path = tmp_path / os.fsdecode(b"gr\xf6sse.txt")
    path.write_text("x")
    assert stem(path) == "gr\ufffdsse"


def test_zstandard_files_are_read_too(tmp_path):
    import pyarrow

    def packed(text):
        raw = text.encode()
        return pyarrow.Codec("zstd").compress(raw).to_pybytes()

    text = "Emma é\nWoodhouse\n"
    (tmp_path / "a.txt.zst").write_bytes(packed(text) + packed("more"))  # two frames
    (tmp_path / "b.jsonl.zst").write_bytes(packed('{"text": "a"}\n{"text": "b"}\n'))
    (file,) = find(str(tmp_path), TEXT_SUFFIXES)
    assert (stem(file), read_text(file)) == ("a", text + "more")
    assert [row for _, row in read_jsonl(tmp_path / "b.jsonl.zst")] == [{"text": "a"}, {"text": "b"}]
    (tmp_path / "bad.txt.zst").write_bytes(packed(text)[:-6])
    (tmp_path / "no.txt.zst").write_bytes(b"plain")
    for name in ("bad", "no"):
        with pytest.raises(DataError, match=f"{name}.txt.zst"):
            read_text(tmp_path / f"{name}.txt.zst")


def test_visible_files_are_sorted_as_paths_are_without_hidden_ones_and_linked_folders(tmp_path):
    shown = ["b/z.py", "b.py", "b-c/a.py", "a/skip/x.py", "a/skip.py"]
    for name in [*shown, "a/.x/y.py", ".h/y.py", "a/._m.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "linked.py").symlink_to(tmp_path / "b.py")
    (tmp_path / "gone.py").symlink_to(tmp_path / "none")
    (tmp_path / "itself.py").symlink_to("itself.py")
    every = sorted(
        file
        for file in tmp_path.rglob("*")
        if file.is_file() and not any(part[0] == "." for part in file.relative_to(tmp_path).parts)
    )
    assert visible(tmp_path) == every and len(every) == 6
    assert visible(tmp_path, without=("skip",)) == [file for file in every if file.parent.name != "skip"]
