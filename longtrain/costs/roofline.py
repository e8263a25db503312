"""Roofline analysis of inference: compares arithmetic intensities with a device's ridge point.

There are two parts: *linear* (products with weights, including the LM head) and *attention* (products with
keys and values; fused, so scores are not written to memory). Each part takes the longer of its arithmetic and
its memory time at the device's peak rates, and the parts run one after the other, so every time is a lower
bound. Source: QuantSpec §3.1, Table 1, Figs. 2, 5 and 6; extended to grouped queries and any bit width of
weights and cache.
Shapes: B batch, S tokens of context, T new tokens of a sequence in one step, H query heads, G KV heads, D
head dim, L layers, V vocabulary, E hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longtrain.costs.hardware import Gpu
from longtrain.costs.model import ITEM, Sizes, Work

GROUP_BYTES = 4
"""Bytes of scale and zero point of one group of quantised numbers, two each."""
GROUP = 128
"""Numbers in a group."""


@dataclass(frozen=True)
class Phase:
    """The work of one phase, separately for its linear layers and its attention."""

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
    """Bits per number as read: 16, or 8 or 4 with a scale and a zero point for each group.

    Args:
        weights: bits of the linear layers' weights.
        kv: bits of keys and values.
    """

    weights: int = 16
    kv: int = 16


def step(size: Sizes, *, batch: int, context: int, rows: int = 1, width: Width = Width()) -> Phase:
    """Work of one decoding step: `rows` new tokens of each sequence over `context` cached ones.

    Args:
        size: the model.
        batch: sequences.
        context: cached tokens of each.
        rows: new tokens of each in the step (several if a draft is verified).
        width: bits of weights and cache.
    """
    tokens = batch * rows
    linear = Work(
        2.0 * tokens * (size.used + size.head),
        stored(size.read(tokens) + size.head, width.weights) + _linear_io(size, tokens, heads=tokens),
    )
    attention = Work(
        4.0 * size.width * tokens * context,
        batch * stored(size.kv_bytes(context) // ITEM, width.kv) + _attention_io(size, tokens),
    )
    return Phase(linear, attention)


def prefill(size: Sizes, *, batch: int, context: int) -> Phase:
    """Work of a causal prefill of `context` tokens, with the LM head for each sequence's last token."""
    tokens = batch * context
    linear = Work(
        2.0 * (tokens * size.used + batch * size.head),
        float(ITEM * (size.read(tokens) + size.head)) + _linear_io(size, tokens, heads=batch),
    )
    attention = Work(
        2.0 * size.width * tokens * context, _attention_io(size, tokens) + batch * size.kv_bytes(context)
    )
    return Phase(linear, attention)


def stored(numbers: int, bits: int) -> float:
    """Return the bytes of `numbers` values of `bits` bits; below 16 bits with scales and zero points."""
    return numbers * bits / 8 + (GROUP_BYTES * numbers / GROUP if bits < 16 else 0)


def intensity(work: Work) -> float:
    """Return the floating-point operations per byte."""
    return work.flops / work.bytes


def ridge(gpu: Gpu) -> float:
    """Return the intensity above which a device is limited by arithmetic instead of memory."""
    return gpu.flops_per_s / gpu.bytes_per_s


def bound_ms(work: Work, gpu: Gpu) -> float:
    """Return the shortest possible milliseconds of one part at the device's peak rates."""
    return work.ms(gpu, flops_share=1.0, bytes_share=1.0)


def metrics(phase: Phase, gpu: Gpu) -> dict[str, Any]:
    """Return each part's intensity, limiting resource and share of time, and the total's lower bound."""
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
    """Return the bytes of the linear layers' inputs and outputs, and of the logits of `heads` tokens."""
    through = size.n_layers * sum(a + b for a, b in size.linears.values())
    return float(ITEM * (tokens * through + heads * (size.hidden_size + size.vocab_size)))


def _attention_io(size: Sizes, tokens: int) -> float:
    """Return the bytes of queries and outputs; keys and values are counted with the cache."""
    return float(2 * ITEM * size.width * tokens)
