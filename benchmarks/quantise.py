"""Milliseconds to write a prompt's keys and values into the quantised cache, over all layers.

This includes everything besides the forward: blocks are quantised, the newest tokens go into the ring buffer,
and at the end the host checks once that every number was representable. For comparison the same keys and
values are copied into a plain cache. Two sets of random inputs alternate, so that they are not in the L2
cache. Shapes: S prompt tokens, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks.operators import RandomInputs, Shape, bandwidth
from longtrain.bench import clock
from longtrain.bench.suites import Auto, Bench, Context, Row, shape_keys
from longtrain.cache.dense import DenseCache
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.costs.model import Sizes
from longtrain.kernels.hierarchical.layout import Split, check_shape
from longtrain.settings import NOT_EMPTY, Count, Lengths

COLUMNS = {
    "prompt tokens": "prompt_tokens",
    "split": "split",
    **clock.spread_columns("ms", "ms"),
    "ms a layer": "layer_ms",
    "TB/s": "tb_per_s",
    "of read": "of_read",
    "copied, ms": "copied.median",
    "cache GiB": "cache_gib",
    "of the plain one": "cache_share",
    "failed": "failed",
}


@dataclass(frozen=True)
class QuantiseSettings:
    """The keys of `suite=quantise`.

    Args:
        shape: the model, for its layers and heads.
        lengths: prompt lengths in tokens.
        splits: how codes are split into the two 4-bit planes.
        repeats: counted prompts.
    """

    shape: Shape
    lengths: Annotated[Lengths, Auto(["32k", "128k"], ["1k"])]
    splits: Annotated[tuple[Split, ...], NOT_EMPTY] = tuple(Split)
    repeats: Count = 10


def run(settings: QuantiseSettings, context: Context) -> Iterator[Row]:
    """Yield a row for each length and split; one that does not fit in memory has `failed`.

    Raises:
        ConfigError: the shape is unknown, or the quantised cache does not support its heads.
    """
    size = Sizes.of_keys(shape_keys(settings.shape))
    check_shape(n_heads=size.n_heads, n_kv_heads=size.n_kv_heads, head_dim=size.head_dim)
    inputs = RandomInputs.usual(context)
    for length in settings.lengths:
        copied: Row = {}
        for split in settings.splits:
            parts = _metrics(size, inputs, length, split, settings.repeats, copied)
            yield clock.filled({"prompt_tokens": length, "split": split.value}, parts, context.device)


def _metrics(
    size: Sizes, inputs: RandomInputs, length: int, split: Split, repeats: int, copied: Row
) -> Iterator[Row]:
    """Yield the metrics of one length and split; `copied` stores the plain cache's, once measured."""
    yield _quantised(size, inputs, length, split, repeats)
    clock.release(inputs.device)
    if not copied:
        copied |= _copied(size, inputs, length, repeats)
    yield {"copied": copied}


def _quantised(size: Sizes, inputs: RandomInputs, length: int, split: Split, repeats: int) -> Row:
    """Time writing prompts into the quantised cache."""
    cache = _cache(HierarchicalCache, size, inputs, length, max_nodes=1, n_heads=size.n_heads, split=split)
    rows = _rows(size, inputs, length)
    n_B = torch.tensor([length], device=inputs.device)

    def prompt() -> None:
        cache.clear()
        cache.expect(n_B)
        for layer in range(size.n_layers):
            cache.write(layer, *rows[layer % 2])
        cache.commit(None, n_B)

    ms = _clocked(prompt, inputs.device, repeats)
    plain = size.n_layers * sum(x.nbytes for x in rows[0])
    moved = plain + cache.bytes() - cache.ring.bytes()
    return {
        "ms": ms,
        "layer_ms": ms["median"] / size.n_layers,
        "moved_bytes": moved,
        **bandwidth(moved, ms["median"], inputs.device),
        "cache_gib": clock.gib(cache.bytes()),
        "cache_share": cache.bytes() / plain,
    }


def _copied(size: Sizes, inputs: RandomInputs, length: int, repeats: int) -> Row:
    """Time writing the same prompts into a plain cache, in milliseconds."""
    cache = _cache(DenseCache, size, inputs, length, max_nodes=0)
    rows = _rows(size, inputs, length)

    def prompt() -> None:
        for layer in range(size.n_layers):
            cache.write(layer, *rows[layer % 2])

    return _clocked(prompt, inputs.device, repeats)


def _rows(size: Sizes, inputs: RandomInputs, length: int) -> list[tuple[Tensor, Tensor]]:
    """Return two sets of keys and values in the attention hook's memory layout: tokens before heads."""
    inputs.restart()
    x = inputs.normal(2, 2, 1, length, size.n_kv_heads, size.head_dim)
    return [(k, v) for k, v in x.transpose(3, 4)]


def _cache(kind: type, size: Sizes, inputs: RandomInputs, length: int, **options: Any) -> Any:
    """Return an empty cache with room for a prompt."""
    return kind(
        n_layers=size.n_layers,
        n_kv_heads=size.n_kv_heads,
        head_dim=size.head_dim,
        batch=1,
        max_tokens=length,
        device=inputs.device,
        dtype=inputs.dtype,
        **options,
    )


def _clocked(prompt: Callable[[], None], device: torch.device, repeats: int) -> Row:
    """Return the spread of the wall time with a synchronised device, after two uncounted prompts."""
    timings = [clock.timed(prompt, device) for _ in range(2 + repeats)]
    return clock.spread([one.wall_ms for one in timings[2:]])


BENCH = Bench(settings=QuantiseSettings, run=run, columns=COLUMNS)
