"""What the command line prints of an error."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longtrain.cache.room import NoRoomError
from longtrain.errors import ConfigError
from longtrain.prompt.explain import explain


def test_running_out_of_memory_says_what_to_do():
    long = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB ..."
    said = explain(torch.OutOfMemoryError(long))
    assert said.startswith("CUDA out of memory. Tried to allocate 2.00 GiB; shorten the packed sequences")
    assert "capacity" not in said and "\n" not in said


def test_our_own_errors_are_printed_as_they_are():
    for error in (ConfigError("x=1; allowed: 2"), NoRoomError("a cache takes 3 GiB")):
        assert explain(error) == str(error)


def test_a_key_below_one_that_is_null_says_how_to_type_it():
    command = ["train", "+recipe=joint_tiny", "method.members.dspark.n_layers=2", "dry_run=true"]
    run = subprocess.run([sys.executable, "-m", "longtrain", *command], capture_output=True, text=True)
    assert run.returncode and "type the key above both, method.members={dspark:{n_layers:2}}" in run.stderr


def test_others_keep_their_type():
    assert (
        explain(ValueError("first\n  second")) == "ValueError: first second (HYDRA_FULL_ERROR=1 shows where)"
    )


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "not enough memory for it; lower what is large"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "no UTF-8 text"),
        (OSError(errno.ENOSPC, "No space left on device"), "the output cannot be written: No space left"),
        (OSError(errno.EIO, "Input/output error", "/x/y"), "/x/y cannot be read or written: Input/output"),
        (
            OSError(errno.EROFS, "Read-only file system", "/x/y"),
            "/x/y: Read-only file system; outputs go",
        ),
    ],
)
def test_what_nobody_nearer_has_put_into_words_is_a_sentence(error, says):
    said = explain(error)
    assert says in said and "\n" not in said and type(error).__name__ not in said


def test_a_long_name_is_shortened():
    said = explain(OSError(errno.ENAMETOOLONG, "File name too long", "/x/" + "y" * 5000))
    assert said.startswith("/x/yyy") and "pass a shorter one" in said and len(said) < 600


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
@pytest.mark.parametrize("words", [["--help"], ["recipes"], ["config", "+recipe=quickstart"]])
def test_an_output_that_is_full_is_one_line(words):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "longtrain", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("longtrain: error: the output cannot be written: No space left on device")
