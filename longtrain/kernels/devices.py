"""Device queries for Triton kernels and their launches.

On compute capability 9.0 a chained kernel is launched before its predecessor ends (programmatic dependent
launch; `chaining` gives the options). It waits for that end (`gdc_wait`) before it writes, and before it
reads results of earlier kernels. Only data written before the last kernel that is not chained may be read
earlier: that kernel starts when all before it have ended. (After its end its own results need not be visible
yet to a chained successor.) Weights are such data, and in attention lengths and quantised blocks: caches
write them at commit, at the end of a cycle. Keys and values are not, since chained kernels write them
(`rotate_heads`, `write_rows`, `move_entries`): these may be prefetched to the L2 cache, but not read.
"""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import AbstractContextManager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longtrain.log import get_logger

log = get_logger(__name__)

LOG2E = 1.4426950408889634
CHAINED = True
"""Use programmatic dependent launch if the device supports it."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_given_up: set[str] = set()


def give_up(name: str, why: str) -> None:
    """Disable a fast kernel for this process, with one warning.

    Args:
        name: name of the kernel.
        why: the reason, as the end of a sentence that begins with triton's version.
    """
    if name in _given_up:
        return
    import triton

    _given_up.add(name)
    log.warning("triton %s %s; a slower implementation is used instead", triton.__version__, why)


def given_up(name: str) -> bool:
    """True if a kernel was disabled by `give_up`."""
    return name in _given_up


def interpreted() -> bool:
    """True if Triton interprets kernels, on any device, instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=32)
def compiles_for(device: torch.device, capability: tuple[int, int] = (8, 0)) -> bool:
    """True if Triton is installed and the device is a GPU of at least this compute capability."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= capability


def runs_on(device: torch.device) -> bool:
    """True if Triton kernels run on this device, compiled or interpreted."""
    return interpreted() or compiles_for(device)


def kernels_serve(x: Tensor) -> bool:
    """True if kernels without matrix products support this tensor; else plain torch is used."""
    if x.dtype not in _FLOATS or x.stride(-1) != 1 or (torch.is_grad_enabled() and x.requires_grad):
        return False
    return runs_on(x.device)


def products_serve(q: Tensor, k: Tensor) -> bool:
    """True if kernels with products of queries and keys support these; the interpreter multiplies no bf16."""
    if k.dtype not in _FLOATS or q.dtype == torch.float64 or k.stride(-1) != 1:
        return False
    return k.dtype != torch.bfloat16 if interpreted() else compiles_for(k.device)


def chaining(device: torch.device) -> dict[str, Any]:
    """A kernel's constant CHAINED, and the launch option for it."""
    if CHAINED and hopper(device):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}


def hopper(device: torch.device) -> bool:
    """True for compute capability 9.0 or more: bulk copies, and launches before their predecessor's end."""
    return compiles_for(device, (9, 0))


def cores(device: torch.device, *, otherwise: int) -> int:
    """Multiprocessors of a GPU; `otherwise` of another device, whose kernels are interpreted."""
    if device.type != "cuda":
        return otherwise
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=32)
def shared_bytes(device: torch.device) -> int:
    """Most shared memory of a program on a GPU; no limit on another device, whose kernels are interpreted."""
    if device.type != "cuda":
        return sys.maxsize
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def launched_on(x: Tensor) -> AbstractContextManager[Any]:
    """Context manager that launches kernels on the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def dense_rows(x: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, as kernels require, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def partial_results(like: Tensor, rows: int, width: int, *more: int) -> tuple[Tensor, ...]:
    """Buffers in fp32 for the partial results of split attention: an lse and `width` sums for each query."""
    sizes = [rows, rows * width, *more]
    return like.new_empty(sum(sizes), dtype=torch.float32).split(sizes)


def width_of(head_dim: int) -> int:
    """Columns of a tile for this head dim: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def register_limit(registers: int | None) -> dict[str, int]:
    """The launch option that limits the registers of a thread."""
    return {"maxnreg": registers} if registers else {}
