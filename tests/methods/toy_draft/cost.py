"""What the toy draft costs."""

from __future__ import annotations

from longtrain.methods.toy_draft.config import Config, layers_of

from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost, MethodCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.costs.training import PackedSequence, StepCost


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Three hidden states a row are read; the rest is its own linear layers and the LM head."""
    read = len({*layers_of(config, size.n_layers), -1}) * size.hidden_size
    return StepCost(
        inputs=row.tokens * read * itemsize,
        module=row.tokens * (2 * size.hidden_size + 2 * config.width) * 4,
        flops=6 * row.tokens * (trained + size.head),
        chunk=row.tokens,
    )


def cycle(config: Config, size: Sizes, widths: tuple[int, ...], itemsize: int) -> CycleCost:
    """No layer of the target runs for a level, only its LM head."""
    width = Width(8 * itemsize, 8 * itemsize)
    levels = tuple(Forward(width, rows=rows, layers=0) for rows in (1, *widths[:-1]))
    return CycleCost("toy", Forward(width), levels, Forward(width, rows=1 + sum(widths)))


COST = MethodCost(training=training, cycle=cycle, suite="training")
