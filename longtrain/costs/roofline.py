"""Which resource each part of inference waits for: arithmetic intensity against a device's ridge point.

Two parts: *linear* (products with weights, the LM head among them) and *attention* (products with keys and
values). Attention is taken as fused: scores are never written. Each part takes the longer of its arithmetic
and its memory time at the device's peak rates, and parts follow one another, so every figure is a bound that
no implementation passes.
Source: QuantSpec §3.1, Table 1, Figs. 2, 5 and 6; written out for grouped queries and any width of weights
and cache.
Shapes: B batch, S tokens of context, T rows of a sequence in one step, H query heads, G KV heads, D head dim,
L layers, V vocabulary, E hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longtrain.costs.hardware import Gpu
from longtrain.costs.model import ITEM, Sizes, Work

GROUP_BYTES = 4
"""Scale and zero of one group of quantised numbers, two bytes each."""
GROUP = 128
"""Numbers of a group."""


@dataclass(frozen=True)
class Phase:
    """The work of one phase, apart for its linear layers and its attention."""

    linear: Work
    attention: Work

    def __add__(self, other: Phase) -> Phase:
        return Phase(self.linear + other.linear, self.attention + other.attention)

    @property
    def whole(self) -> Work:
        """The work of linear layers and attention together."""
        return self.linear + self.attention


@dataclass(frozen=True)
class Width:
    """Bits of a number as it is read: 16, or 8 or 4 with a scale and a zero for each group.

    Args:
        weights: bits of the linear layers' weights.
        kv: bits of keys and values.
    """

    weights: int = 16
    kv: int = 16


def step(size: Sizes, *, batch: int, context: int, rows: int = 1, width: Width = Width()) -> Phase:
    """One decoding step: `rows` new tokens of each sequence over `context` cached ones.

    Args:
        size: the model.
        batch: sequences.
        context: tokens cached of each.
        rows: tokens of each that the step takes (a verified draft has several).
        width: how weights and cache are stored.
    """
    tokens = batch * rows
    linear = Work(
        2.0 * tokens * (size.weights + size.head),
        stored(size.weights + size.head, width.weights) + _linear_io(size, tokens, heads=tokens),
    )
    attention = Work(
        4.0 * size.width * tokens * context,
        batch * stored(size.kv_bytes(context) // ITEM, width.kv) + _attention_io(size, tokens),
    )
    return Phase(linear, attention)


def generation(size: Sizes, *, batch: int, context: int, tokens: int, width: Width = Width()) -> Phase:
    """So many tokens of each sequence, one at a time; the context grows with them.

    All terms are linear in the context, so its mean, to half a token, stands for all.
    """
    one = step(size, batch=batch, context=context + (tokens - 1) // 2, width=width)
    return Phase(
        Work(one.linear.flops * tokens, one.linear.bytes * tokens),
        Work(one.attention.flops * tokens, one.attention.bytes * tokens),
    )


def prefill(size: Sizes, *, batch: int, context: int) -> Phase:
    """Reading prompts of `context` tokens, causally; the LM head for the last row of each."""
    tokens = batch * context
    linear = Work(
        2.0 * (tokens * size.weights + batch * size.head),
        float(ITEM * (size.weights + size.head)) + _linear_io(size, tokens, heads=batch),
    )
    attention = Work(
        2.0 * size.width * tokens * context, _attention_io(size, tokens) + batch * size.kv_bytes(context)
    )
    return Phase(linear, attention)


def stored(numbers: int, bits: int) -> float:
    """Bytes of so many numbers, their groups' scales and zeros included."""
    return numbers * bits / 8 + (GROUP_BYTES * numbers / GROUP if bits < 16 else 0)


def intensity(work: Work) -> float:
    """Floating-point operations a byte."""
    return work.flops / work.bytes


def ridge(gpu: Gpu) -> float:
    """The intensity from which on arithmetic, and no longer memory, is what a device lacks."""
    return gpu.flops_per_s / gpu.bytes_per_s


def bound_ms(work: Work, gpu: Gpu) -> float:
    """Least milliseconds of one part at the device's peak rates."""
    return 1e3 * max(work.flops / gpu.flops_per_s, work.bytes / gpu.bytes_per_s)


def figures(phase: Phase, gpu: Gpu) -> dict[str, Any]:
    """Intensities, what binds each part, its share of the time, and the whole's least time."""
    linear_ms, attention_ms = bound_ms(phase.linear, gpu), bound_ms(phase.attention, gpu)
    found: dict[str, Any] = {
        "ridge": ridge(gpu),
        "ms": linear_ms + attention_ms,
        "attention_share": attention_ms / (linear_ms + attention_ms),
    }
    for name, work in (("linear", phase.linear), ("attention", phase.attention), ("aggregate", phase.whole)):
        found[f"{name}_intensity"] = intensity(work)
        found[f"{name}_bound"] = "memory" if intensity(work) < ridge(gpu) else "compute"
    return found


def _linear_io(size: Sizes, tokens: int, *, heads: int) -> float:
    """Activations that go in and out of the linear layers, and the logits of `heads` rows."""
    through = size.n_layers * sum(a + b for a, b in size.linears.values())
    return float(ITEM * (tokens * through + heads * (size.hidden_size + size.vocab_size)))


def _attention_io(size: Sizes, tokens: int) -> float:
    """Queries and outputs; keys and values are the cache's."""
    return float(2 * ITEM * size.width * tokens)
