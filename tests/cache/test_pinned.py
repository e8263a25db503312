"""Pinned memory of the host: one block is kept for the next owner; a host without any says so in a line."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest

from longtrain.cache import pinned
from longtrain.cache.room import NoRoomError
from longtrain.errors import ConfigError

MIB = 2**20


class Owner:
    """Something that a block belongs to."""


@pytest.fixture
def registered(monkeypatch):
    """Addresses that CUDA was told of and not told to forget; `registered.code` is its answer."""
    told = SimpleNamespace(at=[], code=0)

    def register(address, size, flags):
        if not told.code:
            told.at.append(address)
        return told.code

    cuda = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=told.at.remove)
    monkeypatch.setattr("torch.cuda.cudart", lambda: cuda)
    monkeypatch.setattr(pinned, "_KEPT", [])
    yield told
    pinned.release()


def lent(owner, size):
    return pinned.lent(owner, size, batch=1, tokens=9)


def test_the_largest_block_is_kept_for_the_next_owner(registered):
    first, second = Owner(), Owner()
    block, other = lent(first, 2 * MIB), lent(second, MIB)
    assert (block.nbytes, other.nbytes) == (2 * MIB, MIB) and len(registered.at) == 2
    address = block.data_ptr()
    del first, second, block, other
    assert registered.at == [address]
    third = Owner()
    assert lent(third, MIB).data_ptr() == address and registered.at == [address]
    fourth = Owner()
    assert lent(fourth, 3 * MIB).data_ptr() != address and len(registered.at) == 2
    del third, fourth
    pinned.release()
    assert not registered.at


def test_a_host_that_cannot_pin_says_so_in_one_line_and_can_be_asked_again(registered, monkeypatch):
    owner, registered.code = Owner(), 2
    with pytest.raises(
        ConfigError, match=r"cannot pin 0.0 GiB .*\(CUDA error 2\); .* leave cache=elastic out$"
    ):
        lent(owner, MIB)
    registered.code = 0

    def none(*_):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", none)
        with pytest.raises(ConfigError, match=r"cannot pin .*\(\[Errno 12\] Cannot allocate memory\)"):
            lent(owner, MIB)
    with pytest.raises(NoRoomError, match="the host's copy of a KV cache for 1 sequence of 9 tokens takes"):
        lent(owner, 2**50)
    assert not registered.at and not pinned._KEPT
    assert lent(owner, MIB).nbytes == MIB
