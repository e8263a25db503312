"""Milliseconds that a prompt's keys and values take on their way into the quantised cache, all layers.

Everything that happens to them beside the forward is in it: blocks are quantised, the newest rows go to the
ring, and the host looks once, at the end, whether every number had a code. Beside it the same rows are copied
into a plain cache. Two sets of random rows take turns, so that none is found in the L2 cache.
Shapes: S prompt tokens, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from longtrain.bench import graphs, timing
from longtrain.bench.report import GIB, spread
from longtrain.cache.dense import DenseCache
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.costs.model import Sizes
from longtrain.kernels.hierarchical.layout import Split
from longtrain.log import get_logger

log = get_logger(__name__)

COLUMNS = {
    "prompt tokens": "prompt_tokens",
    "split": "split",
    "ms": "ms.median",
    "p10": "ms.p10",
    "p90": "ms.p90",
    "ms a layer": "layer_ms",
    "TB/s": "tb_per_s",
    "of read": "of_read",
    "copied, ms": "copied.median",
    "cache GiB": "cache_gib",
    "of the plain one": "cache_share",
    "failed": "failed",
}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        device: cuda or cpu.
        dtype: of the rows.
        size: the model's shape.
        lengths: prompt tokens.
        splits: how codes fall into the two planes.
        repeats: prompts counted.
        seed: of the rows.
    """

    device: torch.device
    dtype: torch.dtype
    size: Sizes
    lengths: tuple[int, ...]
    splits: tuple[Split, ...]
    repeats: int = 10
    seed: int = 0


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """One entry a length and split, as they are ready; what does not fit in memory says so."""
    for length in settings.lengths:
        copied: dict[str, float] | None = None
        for split in settings.splits:
            row: dict[str, Any] = {"prompt_tokens": length, "split": split.value}
            try:
                row |= _quantised(settings, length, split)
                timing.release(settings.device)
                copied = copied or _copied(settings, length)
                row["copied"] = copied
            except torch.OutOfMemoryError as error:
                row["failed"] = f"out of memory: {str(error).partition('.')[0]}"
            timing.release(settings.device)
            log.info("prompt_tokens=%d split=%s ms=%s", length, split.value, row.get("ms", {}).get("median"))
            yield row


def _quantised(settings: Settings, length: int, split: Split) -> dict[str, Any]:
    size, device = settings.size, settings.device
    cache = HierarchicalCache(
        n_layers=size.n_layers,
        n_heads=size.n_heads,
        n_kv_heads=size.n_kv_heads,
        head_dim=size.head_dim,
        batch=1,
        max_tokens=length,
        max_nodes=1,
        device=device,
        dtype=settings.dtype,
        split=split,
    )
    rows = _rows(settings, length)
    n_B = torch.tensor([length], device=device)

    def prompt() -> None:
        cache.clear()
        cache.expect(n_B)
        for layer in range(size.n_layers):
            cache.write(layer, *rows[layer % 2])
        cache.commit(None, n_B)

    ms = _clocked(prompt, settings)
    plain = size.n_layers * sum(x.nbytes for x in rows[0])
    moved = plain + cache.bytes() - cache.ring.bytes()
    read = graphs.read_bytes_per_s(device)
    return {
        "ms": ms,
        "layer_ms": ms["median"] / size.n_layers,
        "moved_bytes": moved,
        "tb_per_s": moved / ms["median"] / 1e9,
        "read_tb_per_s": read / 1e12,
        "of_read": 1e3 * moved / ms["median"] / read,
        "cache_gib": cache.bytes() / GIB,
        "cache_share": cache.bytes() / plain,
    }


def _copied(settings: Settings, length: int) -> dict[str, float]:
    """The same rows into a plain cache."""
    size = settings.size
    cache = DenseCache(
        n_layers=size.n_layers,
        n_kv_heads=size.n_kv_heads,
        head_dim=size.head_dim,
        batch=1,
        max_tokens=length,
        max_nodes=0,
        device=settings.device,
        dtype=settings.dtype,
    )
    rows = _rows(settings, length)

    def prompt() -> None:
        for layer in range(size.n_layers):
            cache.write(layer, *rows[layer % 2])

    return _clocked(prompt, settings)


def _clocked(prompt: Any, settings: Settings) -> dict[str, float]:
    """Spread of the wall time from a device at rest to a device at rest, after two prompts not counted."""
    for _ in range(2):
        prompt()
    return spread([timing.run(prompt, settings.device).wall_ms for _ in range(settings.repeats)])


def _rows(settings: Settings, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two sets of keys and values as the attention hook gives them: tokens before heads in memory."""
    gen = torch.Generator(settings.device).manual_seed(settings.seed)
    shape = (2, 2, 1, length, settings.size.n_kv_heads, settings.size.head_dim)
    x = torch.empty(shape, device=settings.device, dtype=settings.dtype)
    x.normal_(generator=gen)
    return [(k, v) for k, v in x.transpose(3, 4)]
