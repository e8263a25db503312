"""Pinned host memory, which a device reads and writes directly, with a pool of one block.

Pinning 17 GB takes seconds, so one block stays pinned when its owner is deleted, for the next owner.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from longtrain.cache.room import GIB, check_room
from longtrain.errors import ConfigError

_KEPT: list[Tensor] = []
"""The pool: at most one block."""


def lent(owner: object, size: int, *, batch: int, tokens: int) -> Tensor:
    """Allocate pinned bytes with undefined content for the lifetime of their owner.

    Args:
        owner: when it is deleted, the block returns to the pool.
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
    """Free the block in the pool."""
    while _KEPT:
        _unpin(_KEPT.pop())


def _keep(block: Tensor) -> None:
    """Return a block to the pool, which keeps the larger one."""
    _KEPT.append(block)
    _KEPT.sort(key=lambda one: one.nbytes)
    while len(_KEPT) > 1:
        _unpin(_KEPT.pop(0))


def _pinned(size: int) -> Tensor:
    """Allocate and register memory directly, since torch's pinned allocator rounds up to a power of two.

    Huge pages (transparent ones, or the driver's) are not read faster, as measured on an H200.
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
