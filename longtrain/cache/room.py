"""Bytes of a cache, checked against the free memory before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from longtrain.errors import ConfigError
from longtrain.kernels.hierarchical.layout import BLOCK, RING

GIB = 2**30


class NoRoomError(ConfigError, torch.OutOfMemoryError):
    """Too little memory; a subclass of `torch.OutOfMemoryError`, so handlers of that catch it."""


def check_room(
    needed: int,
    device: torch.device | str,
    *,
    what: str,
    batch: int,
    tokens: int,
    remedy: str = "shorten the prompts, or lower decode.max_new_tokens or the batch",
) -> None:
    """Refuse a cache that is larger than the free memory.

    Args:
        needed: bytes.
        device: device of the cache.
        what: name of the cache in the message.
        batch: sequences.
        tokens: positions of each sequence.
        remedy: advice in the message.

    Raises:
        NoRoomError: the cache does not fit.
    """
    free = free_bytes(torch.device(device))
    if free is None or needed <= free:
        return
    raise NoRoomError(
        f"{what} for {batch} sequence{'s' if batch > 1 else ''} of {tokens} tokens takes {needed / GIB:.1f} "
        f"GiB and {free / GIB:.1f} GiB are free on {device}; about {free * tokens // needed} tokens would "
        f"fit; {remedy}"
    )


def free_bytes(device: torch.device) -> int | None:
    """Free bytes on a device; None if unknown.

    On CUDA torch's cached memory counts as free; on a CPU the kernel's `MemAvailable` does.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # no Linux
        return None
    memory = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(memory["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in memory else None


def quantised_blocks(max_tokens: int) -> int:
    """Quantised blocks of a hierarchical cache of so many positions; the last ones stay in its ring."""
    return max(1, max_tokens // BLOCK - 1)


def hierarchical_bytes(
    *, n_layers: int, n_kv_heads: int, head_dim: int, batch: int, max_tokens: int, itemsize: int
) -> int:
    """Bytes of all tensors of a hierarchical cache.

    Args:
        n_layers: number of layers.
        n_kv_heads: number of KV heads of each layer.
        head_dim: size of a head.
        batch: number of sequences.
        max_tokens: most committed positions of a sequence.
        itemsize: bytes per number of the full-precision tokens.
    """
    codes = 2 * BLOCK * head_dim  # K and V, a byte for two planes' nibbles
    numbers = 2 * 2 * (head_dim + BLOCK)  # step and zero in fp16 of key channels and value tokens
    ring = 2 * RING * head_dim * itemsize
    heads = n_layers * batch * n_kv_heads
    return heads * (quantised_blocks(max_tokens) * (codes + numbers) + ring) + 2 * 8 * batch
