"""Milliseconds that a prompt's keys and values take on their way into the quantised cache, all layers.

Everything that happens to them beside the forward is in it: blocks are quantised, the newest rows go to the
ring, and the host looks once, at the end, whether every number had a code. Beside it the same rows are copied
into a plain cache. Two sets of random rows take turns, so that none is found in the L2 cache.
Shapes: S prompt tokens, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from longtrain.bench import clock
from longtrain.bench.operators import RandomInputs, bandwidth
from longtrain.bench.suites import Bench, Context, Row, shape_keys
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
CPU_SHAPE = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@dataclass(frozen=True)
class QuantiseSettings:
    """The keys of `suite=quantise`.

    Args:
        shape: the model whose layers and heads are filled: a published name, or the keys of a `config.json`.
        lengths: prompt tokens.
        splits: how codes fall into the two planes.
        repeats: prompts counted.
    """

    shape: str | dict[str, Any]
    lengths: Lengths
    splits: Annotated[tuple[Split, ...], NOT_EMPTY] = tuple(Split)
    repeats: Count = 10


@dataclass(frozen=True)
class PromptFiller:
    """Makes caches of a model, the rows that go into them, and clocks how long they take.

    Args:
        size: the model.
        inputs: device, type and seed of the rows.
        repeats: prompts counted.
    """

    size: Sizes
    inputs: RandomInputs
    repeats: int

    def rows(self, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Two sets of keys and values as the attention hook gives them: tokens before heads in memory."""
        self.inputs.restart()
        x = self.inputs.normal(2, 2, 1, length, self.size.n_kv_heads, self.size.head_dim)
        return [(k, v) for k, v in x.transpose(3, 4)]

    def new_cache(self, kind: type, length: int, max_nodes: int, **options: Any) -> Any:
        """An empty cache with room for a prompt."""
        return kind(
            n_layers=self.size.n_layers,
            n_kv_heads=self.size.n_kv_heads,
            head_dim=self.size.head_dim,
            batch=1,
            max_tokens=length,
            max_nodes=max_nodes,
            device=self.inputs.device,
            dtype=self.inputs.dtype,
            **options,
        )

    def clocked(self, prompt: Callable[[], None]) -> dict[str, float]:
        """Spread of the wall time, from a device at rest to one at rest, after two prompts not counted."""
        for _ in range(2):
            prompt()
        timings = [clock.timed(prompt, self.inputs.device) for _ in range(self.repeats)]
        return clock.spread([one.wall_ms for one in timings])


def run(settings: QuantiseSettings, context: Context) -> Iterator[Row]:
    """One row a length and split, as they are ready; what does not fit in memory says so.

    Raises:
        ConfigError: an unknown shape, or heads that the quantised cache does not serve.
    """
    size = Sizes.of_keys(shape_keys(settings.shape))
    check_shape(n_heads=size.n_heads, n_kv_heads=size.n_kv_heads, head_dim=size.head_dim)
    filler = PromptFiller(size, RandomInputs.usual(context), settings.repeats)
    for length in settings.lengths:
        copied: dict[str, float] | None = None
        for split in settings.splits:
            row: Row = {"prompt_tokens": length, "split": split.value}
            with clock.memory_may_run_out(row, context.device):
                row |= _quantised(filler, length, split)
                clock.release(context.device)
                copied = copied or _copied(filler, length)
                row["copied"] = copied
            yield row


def _quantised(filler: PromptFiller, length: int, split: Split) -> Row:
    size, device = filler.size, filler.inputs.device
    cache = filler.new_cache(HierarchicalCache, length, 1, n_heads=size.n_heads, split=split)
    rows = filler.rows(length)
    n_B = torch.tensor([length], device=device)

    def prompt() -> None:
        cache.clear()
        cache.expect(n_B)
        for layer in range(size.n_layers):
            cache.write(layer, *rows[layer % 2])
        cache.commit(None, n_B)

    ms = filler.clocked(prompt)
    plain = size.n_layers * sum(x.nbytes for x in rows[0])
    moved = plain + cache.bytes() - cache.ring.bytes()
    return {
        "ms": ms,
        "layer_ms": ms["median"] / size.n_layers,
        "moved_bytes": moved,
        **bandwidth(moved, ms["median"], device),
        "cache_gib": clock.gib(cache.bytes()),
        "cache_share": cache.bytes() / plain,
    }


def _copied(filler: PromptFiller, length: int) -> dict[str, float]:
    """The same rows into a plain cache."""
    cache = filler.new_cache(DenseCache, length, 0)
    rows = filler.rows(length)

    def prompt() -> None:
        for layer in range(filler.size.n_layers):
            cache.write(layer, *rows[layer % 2])

    return filler.clocked(prompt)


BENCH = Bench(
    settings=QuantiseSettings,
    run=run,
    columns=COLUMNS,
    auto={"shape": ("llama31_8b", CPU_SHAPE), "lengths": (["32k", "128k"], ["1k"])},
)
