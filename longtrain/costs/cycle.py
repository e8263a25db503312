"""Expected time of a decoding cycle: bytes read at a share of the bandwidth, plus a constant.

A cycle of self-speculation consists of its draft steps and one verification; a plain step is a verification
of one token. The lower bound (`roofline.metrics`) uses the data sheet's peaks and no constant.
Source: QuantSpec §3.1 for the bytes read. Shares and constant are assumptions, not fitted: on one H200 plain
steps took 0.86 to 1.06 of the predicted time, and QuantSpec's cycles 0.93 to 1.1 (recipes/results).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longtrain.costs import roofline
from longtrain.costs.model import ITEM, Sizes, Work
from longtrain.costs.roofline import Phase, Width

OTHER_MS = 0.35
"""Milliseconds of a forward besides its reads: norms, rotary, activation, launches, sampling."""
WEIGHT_SHARE = {32: 0.87, 16: 0.87, 4: 0.65}
KV_SHARE = {32: 0.85, 16: 0.85, 8: 0.75, 4: 0.75}
"""Share of the read bandwidth that attention kernels reach, by bits of a cached number."""


@dataclass(frozen=True)
class Forward:
    """One forward pass of a cycle.

    Args:
        width: bits in which weights and cache are read.
        rows: new tokens of each sequence.
        times: forwards per cycle; 0.5: one in every second cycle.
        layers: number of layers with a dense MLP that run and whose cache is read; None: all of the model's.
            The LM head always runs.
        more_weights: weights read in addition to these layers'; negative if fewer are read.
        seen: largest number of cached tokens that attention reads (a window, or selected entries); None: all.
        more_keys: numbers read for every cached token in addition to its K and V in these layers.
    """

    width: Width
    rows: int = 1
    times: float = 1
    layers: int | None = None
    more_weights: int = 0
    seen: int | None = None
    more_keys: int = 0

    def phase(self, size: Sizes, *, batch: int, context: int) -> Phase:
        """Return the work of this forward.

        Args:
            size: the model.
            batch: sequences.
            context: cached tokens of each.
        """
        some = size if self.layers is None else replace(size, n_layers=self.layers, experts=None)
        seen = context if self.seen is None else min(context, self.seen)
        phase = roofline.step(some, batch=batch, context=seen, rows=self.rows, width=self.width)
        more, keys = self.more_weights, batch * context * self.more_keys
        linear = Work(2.0 * batch * self.rows * more, float(ITEM * more))
        return phase + Phase(linear, Work(2.0 * self.rows * keys, roofline.stored(keys, self.width.kv)))


def expected_ms(
    forwards: list[Forward], size: Sizes, *, batch: int, context: int, bytes_per_s: float
) -> float:
    """Return the predicted milliseconds of a cycle, by bytes read; arithmetic counts as free.

    Args:
        forwards: the cycle's forwards.
        size: the model.
        batch: sequences.
        context: cached tokens of each.
        bytes_per_s: the device's read bandwidth.
    """

    def one(forward: Forward) -> float:
        phase = forward.phase(size, batch=batch, context=context)
        weights = phase.linear.bytes / WEIGHT_SHARE[forward.width.weights]
        read_ms = 1e3 * (weights + phase.attention.bytes / KV_SHARE[forward.width.kv]) / bytes_per_s
        layers = size.n_layers if forward.layers is None else forward.layers
        return OTHER_MS * layers / size.n_layers + read_ms

    return sum(forward.times * one(forward) for forward in forwards)
