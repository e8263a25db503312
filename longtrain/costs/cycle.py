"""What a cycle should take: bytes read at shares of the bandwidth that good kernels reach, and a constant.

A cycle of self-speculation is its draft steps and one verification; a plain one is a verification of one row.
The bound beside it (`roofline.figures`) takes the data sheet's peaks and no constant.
Source: QuantSpec §3.1 for what is read. Shares and constant are assumptions, no fits: on one H200
plain steps took 0.86 to 1.06 of what they say, and QuantSpec's cycles 0.93 to 1.1 of it (recipes/results).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longtrain.costs import roofline
from longtrain.costs.hardware import Gpu
from longtrain.costs.model import ITEM, Sizes, Work
from longtrain.costs.roofline import Phase, Width

OTHER_MS = 0.35
"""Milliseconds of a forward beside its reads: norms, rotary, activation, launches, choosing a token."""
WEIGHT_SHARE = {32: 0.87, 16: 0.87, 4: 0.65}
KV_SHARE = {32: 0.85, 16: 0.85, 8: 0.75, 4: 0.75}
"""Shares of the read bandwidth that kernels reach, by bits of a number."""


@dataclass(frozen=True)
class Forward:
    """One forward of a cycle.

    Args:
        width: how weights and cache are read.
        rows: of a sequence.
        times: how often in a cycle; a half: in every second one.
        layers: of the model that run, and whose cache is read; None: all. The LM head always runs.
        more_weights: read beside those of these layers; below 0 where less is read.
        seen: cached tokens that attention reads at most (a window, or chosen rows); None: all.
        more_keys: numbers that are read of every cached token beside its K and V in these layers.
    """

    width: Width
    rows: int = 1
    times: float = 1
    layers: int | None = None
    more_weights: int = 0
    seen: int | None = None
    more_keys: int = 0


def expected_ms(
    forwards: list[Forward], size: Sizes, *, batch: int, context: int, bytes_per_s: float
) -> float:
    """Milliseconds of a cycle by the step model; arithmetic is taken to be free.

    Args:
        forwards: of a cycle.
        size: the model.
        batch: sequences.
        context: tokens cached of each.
        bytes_per_s: what the device reads a second.
    """

    def one(forward: Forward) -> float:
        phase = _phase(forward, size, batch, context)
        weights = phase.linear.bytes / WEIGHT_SHARE[forward.width.weights]
        read_ms = 1e3 * (weights + phase.attention.bytes / KV_SHARE[forward.width.kv]) / bytes_per_s
        layers = size.n_layers if forward.layers is None else forward.layers
        return OTHER_MS * layers / size.n_layers + read_ms

    return sum(forward.times * one(forward) for forward in forwards)


def bound_ms(forwards: list[Forward], size: Sizes, gpu: Gpu, *, batch: int, context: int) -> float:
    """Least milliseconds of a cycle at the device's peaks."""
    return sum(
        forward.times * roofline.figures(_phase(forward, size, batch, context), gpu)["ms"]
        for forward in forwards
    )


def bytes_read(forwards: list[Forward], size: Sizes, *, batch: int, context: int) -> float:
    """Bytes that a cycle reads and writes at least."""
    return sum(forward.times * _phase(forward, size, batch, context).whole.bytes for forward in forwards)


def _phase(forward: Forward, size: Sizes, batch: int, context: int) -> Phase:
    some = size if forward.layers is None else replace(size, n_layers=forward.layers)
    seen = context if forward.seen is None else min(context, forward.seen)
    phase = roofline.step(some, batch=batch, context=seen, rows=forward.rows, width=forward.width)
    more, keys = forward.more_weights, batch * context * forward.more_keys
    linear = Work(2.0 * batch * forward.rows * more, float(ITEM * more))
    return phase + Phase(linear, Work(2.0 * forward.rows * keys, roofline.stored(keys, forward.width.kv)))
