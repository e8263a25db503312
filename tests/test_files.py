"""Files are written whole, and nothing that stands in a file's place hangs whoever reads or locks it."""

import os

import pytest

from longtrain.errors import LongtrainError
from longtrain.files import LARGEST_TEXT, lock, read_bytes, read_json, read_text, write_text

NOT_FILES = ["a pipe", "a folder", "a device"]


def put(path, what):
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("what", NOT_FILES)
@pytest.mark.parametrize("read", [read_bytes, read_json, read_text])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, what, read):
    put(tmp_path / "x", what)
    with pytest.raises(OSError, match=f"it is {what}, not a regular file"):
        read(tmp_path / "x")


def test_a_text_beyond_all_that_is_ours_is_not_read(tmp_path):
    with (tmp_path / "x").open("wb") as stream:
        stream.truncate(LARGEST_TEXT + 1)  # takes no room on the disk
    for read in (read_json, read_text):
        with pytest.raises(OSError, match=f"it has {LARGEST_TEXT + 1} bytes"):
            read(tmp_path / "x")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000])
def test_deep_json_is_a_value_error(tmp_path, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "x")


@pytest.mark.parametrize("what", NOT_FILES)
def test_a_lock_that_is_no_file_is_one_clear_error(tmp_path, what):
    put(tmp_path / "x.lock", what)
    with pytest.raises(LongtrainError, match=r"cannot write .*x\.lock"), lock(tmp_path / "x.lock"):
        pytest.fail("it began")


def test_only_one_holds_a_lock(tmp_path):
    with lock(tmp_path / "x") as first, lock(tmp_path / "x") as second:
        assert (first, second) == (True, False)
    with lock(tmp_path / "x") as third:
        assert third


def test_a_place_that_may_only_be_read_needs_no_lock(tmp_path, monkeypatch):
    def refused(path, flags, *rest, **more):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system", str(path))
        return real(path, flags, *rest, **more)

    real = os.open
    monkeypatch.setattr(os, "open", refused)
    with lock(tmp_path / "x", read_only=True) as held:
        assert held
    with pytest.raises(LongtrainError, match="Read-only file system"), lock(tmp_path / "x"):
        pytest.fail("it began")


def test_writing_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x").symlink_to(tmp_path / "elsewhere" / "y")
    for text in ("one", "two"):
        write_text(tmp_path / "x", text)
        assert (tmp_path / "x").is_symlink() and (tmp_path / "elsewhere" / "y").read_text() == text
    assert len(list(tmp_path.rglob("*"))) == 3
