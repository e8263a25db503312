"""Pinned memory of the host, which a device reads and writes by itself; kept for whoever wants some next.

To pin 17 GB takes seconds, so one block stays pinned when its owner goes, and the next owner gets it.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from longtrain.cache.room import GIB, check_room
from longtrain.errors import ConfigError

_KEPT: list[Tensor] = []
"""At most one block, which nobody owns."""


def lent(owner: object, size: int, *, batch: int, tokens: int) -> Tensor:
    """Bytes that a CUDA device reads and writes, as long as their owner is there, with any content.

    Args:
        owner: when it goes, the block is kept for the next.
        size: bytes.
        batch: sequences, for a message.
        tokens: positions of each, likewise.

    Raises:
        ConfigError: the host has too little memory, or none that can be pinned.
    """
    block = _KEPT.pop() if _KEPT else None
    if block is not None and block.nbytes < size:
        _unpin(block)
        block = None
    if block is None:
        check_room(size, "cpu", what="the host's copy of a KV cache", batch=batch, tokens=tokens)
        block = _pinned(size)
    weakref.finalize(owner, _keep, block).atexit = False
    return block[:size]


def release() -> None:
    """Give the block that nobody owns back to the host."""
    while _KEPT:
        _unpin(_KEPT.pop())


def _keep(block: Tensor) -> None:
    """Keep this block, or the one that is kept already where that is larger."""
    _KEPT.append(block)
    _KEPT.sort(key=lambda one: one.nbytes)
    while len(_KEPT) > 1:
        _unpin(_KEPT.pop(0))


def _pinned(size: int) -> Tensor:
    """New memory, registered, since torch's allocator of pinned memory rounds up to a power of two.

    Large pages (transparent ones, or the driver's) are read no faster: measured on an H200.
    """
    try:
        block = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0))
        refused = f"CUDA error {code}" if code else ""
    except OSError as error:
        refused = str(error)
    if refused:
        raise ConfigError(
            f"the host cannot pin {size / GIB:.1f} GiB for the device to read ({refused}); "
            "shorten the prompts, lower decode.max_new_tokens or the batch, or leave cache=elastic out"
        )
    return block


def _unpin(block: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
