"""A folder that is replaced is there whole, old or new, whenever the process is killed."""

import errno
import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longtrain.data.packing.prepared import PreparedWriter
from longtrain.errors import LongtrainError
from longtrain.folders import FolderKind, finish_replacement, replaced_folder

KIND = FolderKind("a thing", ("a", "x", "c", "y", "ids.npy"), ("?", "*.npy"))


def inside(folder):
    return [path.name for path in folder.iterdir()]


REPLACE = """
import os, shutil, signal, sys
from pathlib import Path
from longtrain.folders import FolderKind, replaced_folder

folder, last = Path(sys.argv[1]), int(sys.argv[2])
KIND = FolderKind("a thing", ("a", "c"), ("?",))
calls = 0

def counted(real):
    def call(*args, **options):
        global calls
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return real(*args, **options)
    return call

for name in ("mkdir", "rename", "replace", "unlink", "rmdir"):
    setattr(os, name, counted(getattr(os, name)))
with replaced_folder(folder, KIND) as fresh:
    for name in ("a", "b"):
        counted((fresh / name).write_text)("new")
"""


@pytest.mark.parametrize("before", ["absent", "old"])
def test_the_next_run_finishes_or_undoes_what_a_kill_left_at_any_step(tmp_path, before):
    seen = set()
    for last in range(30):
        folder = tmp_path / str(last) / "data"
        folder.parent.mkdir()
        if before == "old":
            with replaced_folder(folder, KIND) as fresh:
                (fresh / "c").write_text("old")
        done = subprocess.run([sys.executable, "-c", REPLACE, str(folder), str(last)], check=False)
        left = tuple(sorted(inside(folder.parent)))
        seen.add(left)
        finish_replacement(folder)
        found = {path.name: path.read_text() for path in folder.iterdir()} if folder.exists() else None
        assert found in ({"a": "new", "b": "new"}, {"c": "old"} if before == "old" else None), left
        finish_replacement(folder, wait=True)
        assert inside(folder.parent) == ([] if found is None else ["data"])
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    else:
        pytest.fail("it never came to its end")
    if before == "old":
        assert {(".data.new", ".data.old"), (".data.new", "data"), (".data.old", "data"), ("data",)} <= seen
    else:
        assert seen == {(), (".data.new",), ("data",)}


def test_a_replacement_that_another_process_is_at_is_left_alone(tmp_path):
    folder = tmp_path / "data"
    with replaced_folder(folder, KIND) as fresh:
        (fresh / "a").write_text("old")
    with replaced_folder(folder, KIND) as fresh:
        (fresh / "a").write_text("new")
        finish_replacement(folder)
        assert inside(fresh) == ["a"] and (folder / "a").read_text() == "old"
    assert (folder / "a").read_text() == "new" and inside(tmp_path) == ["data"]


def test_without_locks_only_a_folder_that_is_missing_is_put_in_its_place(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    folder, fresh, old = (tmp_path / name for name in ("data", ".data.new", ".data.old"))
    folder.mkdir()
    fresh.mkdir()
    finish_replacement(folder)
    assert fresh.exists()
    folder.replace(old)
    finish_replacement(folder)
    assert inside(tmp_path) == ["data"]
    with replaced_folder(folder, KIND) as fresh:
        (fresh / "a").write_text("new")
    assert inside(folder) == ["a"]


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    folder = tmp_path / "data"
    with replaced_folder(folder, KIND) as temporary:
        (temporary / "x").write_text("old")
    with pytest.raises(ZeroDivisionError), replaced_folder(folder, KIND) as temporary:
        (temporary / "x").write_text("new")
        raise ZeroDivisionError
    assert (folder / "x").read_text() == "old" and inside(tmp_path) == ["data"]
    with replaced_folder(folder, KIND) as temporary:
        (temporary / "y").write_text("new")
    assert inside(folder) == ["y"] and inside(tmp_path) == ["data"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path):
    folder = tmp_path / "data"
    with pytest.raises(LongtrainError, match=r"cannot write .*data.*No space left.*MB free.*home=FOLDER"):
        with replaced_folder(folder, KIND) as temporary:
            (temporary / "mask.npy").symlink_to("/dev/full")
            writer = PreparedWriter(temporary, 100)
            writer.add(np.zeros(10**6, np.int64), np.ones(10**6, np.uint8), name="d", kind="x")
            writer.close({})
    assert inside(tmp_path) == []


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(PermissionError), replaced_folder(tmp_path / "data", KIND):
        raise PermissionError(errno.EACCES, "no")


def test_a_folder_under_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(LongtrainError, match=r"cannot write .*home.*home=FOLDER") as error:
        with replaced_folder(tmp_path / "home" / "data", KIND):
            pass
    assert "\n" not in str(error.value)


def test_what_a_killed_run_left_is_cleared(tmp_path):
    folder = tmp_path / "data"
    for left in (".data.new", ".data.old"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "ids.npy").write_text("half" if left.endswith("new") else "old")
    with replaced_folder(folder, KIND) as temporary:
        assert inside(temporary) == []
        (temporary / "x").write_text("whole")
    assert inside(tmp_path) == ["data"] and inside(folder) == ["x"]


def test_only_a_folder_of_the_same_kind_is_replaced(tmp_path):
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "x").write_text("hours of work")
    for name, said in [
        ("train/x", "holds train/x, which is no part of one"),
        ("b", "has no a or x or c or y or ids.npy"),
    ]:
        (folder / name).write_text("mine")
        with pytest.raises(
            LongtrainError, match=f"data exists and is not replaced by a thing, since it {said}"
        ):
            with replaced_folder(folder, KIND):
                pytest.fail("it began")
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
    with pytest.raises(LongtrainError, match="since it holds"), replaced_folder(folder, KIND) as fresh:
        (fresh / "a").write_text("new")
        (folder / "notes.txt").write_text("another process wrote this meanwhile")
    assert (folder / "notes.txt").is_file() and inside(tmp_path) == ["data"]


def test_parts_of_a_path_that_lead_elsewhere_are_followed_before_anything_is_made(tmp_path):
    run = tmp_path / "x"
    (run / "train").mkdir(parents=True)
    (run / "train" / "weights").write_text("hours of work")
    with pytest.raises(LongtrainError, match="holds train/weights"):
        with replaced_folder(tmp_path / "checkpoints" / ".." / "x", KIND) as fresh:
            (fresh / "a").write_text("new")
    assert (run / "train" / "weights").read_text() == "hours of work"


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    big, home = tmp_path / "big", tmp_path / "home"
    big.mkdir()
    home.mkdir()
    (home / "data").symlink_to(big / "data")
    for text in ("old", "new"):
        with replaced_folder(home / "data", KIND) as fresh:
            assert fresh.parent == big
            (fresh / "a").write_text(text)
        finish_replacement(home / "data")
    assert (home / "data").is_symlink() and (home / "data" / "a").read_text() == "new"
    assert inside(big) == inside(home) == ["data"]


def test_a_link_into_a_folder_that_is_not_there_is_one_clear_error(tmp_path):
    (tmp_path / "data").symlink_to(tmp_path / "disk" / "data")
    with pytest.raises(LongtrainError, match=r"is a link to .*disk/data, and .*disk is not there; .*mount"):
        with replaced_folder(tmp_path / "data", KIND):
            pass
    assert inside(tmp_path) == ["data"]


@pytest.mark.parametrize("left", [".data.old", ".data.new"])
@pytest.mark.parametrize("is_link", [True, False])
def test_a_link_or_a_file_that_was_left_is_removed_itself(tmp_path, left, is_link):
    weights = tmp_path / "elsewhere"
    weights.mkdir()
    (weights / "a").write_text("old weights")
    folder = tmp_path / "data"
    with replaced_folder(folder, KIND) as fresh:
        (fresh / "a").write_text("one")
    (tmp_path / left).symlink_to(weights) if is_link else (tmp_path / left).write_text("")
    with replaced_folder(folder, KIND) as fresh:
        (fresh / "a").write_text("two")
    assert (folder / "a").read_text() == "two" and sorted(inside(tmp_path)) == ["data", "elsewhere"]
    assert (weights / "a").read_text() == "old weights"
