"""What LongSpec costs: its training step, and a cycle of its draft."""

from __future__ import annotations

from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost, MethodCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.costs.training import PackedRow, StepCost, draft_step
from longtrain.methods.longspec.config import Config


def training(config: Config, size: Sizes, row: PackedRow, trained: int, itemsize: int) -> StepCost:
    """A step in chunks; hidden states are read for the KL objective alone."""
    return draft_step(
        size,
        row,
        trained=trained,
        itemsize=itemsize,
        hidden=config.objective == "kl",
        chunk_tokens=config.chunk_tokens,
        window=config.window,
    )


def cycle(config: Config, size: Sizes, widths: tuple[int, ...], itemsize: int) -> CycleCost:
    """A layer with two attentions a level, then the target over all nodes."""
    width = Width(8 * itemsize, 8 * itemsize)
    cross = 2 * size.hidden_size * size.n_heads * size.head_dim  # queries and output of its cross-attention
    above = (1, *widths[:-1])
    return CycleCost(
        title="LongSpec",
        alone=Forward(width),
        draft=tuple(Forward(width, rows=rows, layers=1, more_weights=cross) for rows in above),
        verify=Forward(width, rows=1 + sum(widths)),
        weight_bytes=float(itemsize * (size.weights // size.n_layers + cross)),
    )


COST = MethodCost(training=training, cycle=cycle)
