"""Files of torch.save: every change of a byte is refused or changes nothing, and nothing in them is run."""

import os
import random

import pytest
import torch

from longtrain.pickled import read_pickled, read_pickled_tensors

TENSORS = {"a": torch.arange(48.0).view(6, 8), "b": torch.ones(5, dtype=torch.bfloat16)}


class Runs:
    def __reduce__(self):
        return os.system, ("echo run > /tmp/it_ran",)


@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_come_back(tmp_path, mmap):
    torch.save(TENSORS, tmp_path / "x.bin")
    found = read_pickled_tensors(tmp_path / "x.bin", mmap=mmap)
    assert found.keys() == TENSORS.keys() and all(torch.equal(found[key], TENSORS[key]) for key in found)
    torch.save(TENSORS, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read_pickled_tensors(tmp_path / "old.bin", mmap=mmap)["a"], TENSORS["a"])


def test_no_bit_that_flips_gives_other_tensors(tmp_path):
    torch.save(TENSORS, tmp_path / "x.bin")
    whole, rng, refused = (tmp_path / "x.bin").read_bytes(), random.Random(0), 0
    for _ in range(300):
        at, bit = rng.randrange(len(whole)), rng.randrange(8)
        (tmp_path / "y.bin").write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
        try:
            found = read_pickled_tensors(tmp_path / "y.bin")
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
            continue
        assert found.keys() == TENSORS.keys() and all(torch.equal(found[key], TENSORS[key]) for key in found)
    assert refused > 100


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Runs(), "it holds more than tensors, and nothing in such a file is run"),
        ([1], "it holds a list, and no tensors by name"),
        ({"a": 1}, "it holds 'a', which is no tensor"),
        ({"a": torch.eye(3).to_sparse()}, "tensor a is sparse_coo on cpu; allowed: dense"),
        (
            {"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])},
            "tensor a is nested on cpu; allowed",
        ),
        ({"a": torch.empty(3, device="meta")}, "tensor a is strided on meta; allowed: dense"),
    ],
)
def test_what_holds_other_things_is_refused_in_a_sentence(tmp_path, value, says):
    torch.save(value, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=says) as error:
        read_pickled_tensors(tmp_path / "x.bin")
    assert "weights_only=False" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", b"\x80\x02", b"\x80" * 1000])
def test_garbage_is_refused_in_a_sentence(tmp_path, content):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"\w") as error:
        read_pickled(tmp_path / "x.bin")
    assert "\n" not in str(error.value)


def test_a_pipe_hangs_nobody(tmp_path):
    os.mkfifo(tmp_path / "x.bin")
    with pytest.raises(OSError, match="it is a pipe"):
        read_pickled(tmp_path / "x.bin")
