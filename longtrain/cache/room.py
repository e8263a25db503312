"""Bytes of a cache, and whether they fit into the memory that is left: known before any of it is taken."""

from __future__ import annotations

from pathlib import Path

import torch

from longtrain.errors import ConfigError
from longtrain.kernels.hierarchical.layout import BLOCK, RING

GIB = 2**30


class NoRoomError(ConfigError, torch.OutOfMemoryError):
    """Memory would run out: whoever answers `torch.OutOfMemoryError` answers this too."""


def check_room(
    needed: int,
    device: torch.device | str,
    *,
    what: str,
    batch: int,
    tokens: int,
    remedy: str = "shorten the prompts, or lower decode.max_new_tokens or the batch",
) -> None:
    """Refuse a cache that is larger than the memory that is left.

    Args:
        needed: bytes.
        device: the device that the cache is to lie on.
        what: the cache, for the message.
        batch: sequences.
        tokens: positions of each.
        remedy: what to do then, for the message.

    Raises:
        NoRoomError: the cache is larger than that.
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
    """Bytes that can still be taken there; None where nobody knows.

    On CUDA what torch keeps for later tensors counts as free; on a CPU what the kernel calls available.
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
    said = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(said["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in said else None


def quantised_blocks(max_tokens: int) -> int:
    """Blocks of a hierarchical cache of so many positions; the last ones stay in its ring."""
    return max(1, max_tokens // BLOCK - 1)


def hierarchical_bytes(
    *, n_layers: int, n_kv_heads: int, head_dim: int, batch: int, max_tokens: int, itemsize: int
) -> int:
    """Bytes of a hierarchical cache, everything counted.

    Args:
        n_layers: layers.
        n_kv_heads: KV heads of each.
        head_dim: size of a head.
        batch: sequences.
        max_tokens: most committed positions of a sequence.
        itemsize: bytes of a number of recent tokens.
    """
    codes = 2 * BLOCK * head_dim  # K and V, a byte for two planes' nibbles
    numbers = 2 * 2 * (head_dim + BLOCK)  # step and zero in fp16 of key channels and value tokens
    ring = 2 * RING * head_dim * itemsize
    heads = n_layers * batch * n_kv_heads
    return heads * (quantised_blocks(max_tokens) * (codes + numbers) + ring) + 2 * 8 * batch
