"""Caches for measuring what quantised keys and values cost.

`UpperHalfCache` lets the target read what a draft reads. `RoundedCache` serves choices that no kernel serves:
it keeps every row in full precision and writes back, for the tokens that a hierarchical cache would have
quantised, what such a cache would read.

Shapes: L layers, B batch, T new rows, S slots, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from longtrain.cache.base import Mask
from longtrain.cache.dense import DenseCache
from longtrain.cache.engine_rules import RULES
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.errors import ConfigError, refusal
from longtrain.kernels.hierarchical.layout import BLOCK, Split
from longtrain.kernels.hierarchical.reference import quantise
from longtrain.settings import OneOf


class Axis(Enum):
    """Which numbers share a step and a zero.

    CHANNEL: those of a channel in a block of 128 tokens. TOKEN: those of a token, all channels of its head.
    """

    CHANNEL = "channel"
    TOKEN = "token"


@dataclass(frozen=True)
class Rounding:
    """How old keys and values are rounded.

    Args:
        keys: axis of the keys' groups.
        values: axis of the values' groups.
        bits: 4 reads the upper nibble alone, 8 both.
        split: how an 8-bit code falls into two nibbles.

    Raises:
        ConfigError: bits other than 4 and 8.

    Source: QuantSpec §4.2 and Table 5.
    """

    keys: Axis = Axis.CHANNEL
    values: Axis = Axis.TOKEN
    bits: int = 8
    split: Split = Split.FLOOR

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise refusal(ConfigError, f"rounding to {self.bits} bits", "4, 8")

    def read(self, k_GSD: Tensor, v_GSD: Tensor) -> tuple[Tensor, Tensor]:
        """See `Reads`; S is a multiple of 128."""
        return rounded(k_GSD, self.keys, self), rounded(v_GSD, self.values, self)

    def bytes_per_number(self, head_dim: int) -> float:
        """Bytes of a cached number if nothing but `bits` were stored; step and zero are of fp16."""
        sharing = {Axis.CHANNEL: BLOCK, Axis.TOKEN: head_dim}
        return self.bits / 8 + (4 / sharing[self.keys] + 4 / sharing[self.values]) / 2


@dataclass(frozen=True)
class EngineRounding:
    """A rule of vLLM, as a cache of its own.

    Args:
        rule: which.
        at_once: rows are rounded when they are written, a prompt's too, as engines do; False: when our cache
            would quantise them, so that nothing but the rule differs.
    """

    rule: Annotated[str, OneOf(*RULES)]
    at_once: bool = False

    def read(self, k_GSD: Tensor, v_GSD: Tensor) -> tuple[Tensor, Tensor]:
        """See `Reads`."""
        rule = RULES[self.rule]
        return rule.keys(k_GSD), rule.values(v_GSD)


class Reads(Protocol):
    """A way of rounding rows."""

    def read(self, k_GSD: Tensor, v_GSD: Tensor) -> tuple[Tensor, Tensor]:
        """What is read of old keys and values, in their shapes and dtypes, fp32 or wider."""


class UpperHalfCache(HierarchicalCache):
    """A hierarchical cache whose target reads quantised tokens at 4 bits, as its draft does."""

    bits = 4


class RoundedCache(DenseCache):
    """A plain cache that rounds tokens when a hierarchical one would quantise them; it saves no memory.

    A prompt is read in full precision; then all but its last 128 to 255 tokens are rounded, and the oldest
    full block whenever two are full. Rows are held in fp32 (fp64 for fp64), so that nothing but `rounding`
    is rounded.

    Args:
        rounding: how.
        at_once: rows are rounded as they are written instead, those of the prompt before they are read.
        dtype: dtype of the model.
        sizes: see `DenseCache`.
    """

    def __init__(self, *, rounding: Reads, dtype: torch.dtype, at_once: bool = False, **sizes: Any) -> None:
        super().__init__(dtype=torch.promote_types(dtype, torch.float32), **sizes)
        self.rounding, self.at_once = rounding, at_once
        self.blocks_B = torch.zeros_like(self.len_B)

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See `DenseCache`."""
        k_BGTD, v_BGTD = k_BGTD.to(self.k_LBGSD.dtype), v_BGTD.to(self.k_LBGSD.dtype)
        if self.at_once:
            k_BGTD, v_BGTD = self.rounding.read(k_BGTD, v_BGTD)
        super().write(layer, k_BGTD, v_BGTD)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """See `DenseCache`; in the rows' precision."""
        out, lse = super().attend(layer, q_BHTD.to(self.k_LBGSD.dtype), mask=mask, scale=scale)
        return out.to(q_BHTD.dtype), lse

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Accept rows, and round those whose time has come; asks the host for lengths."""
        first = not bool(self.len_B.any())
        super().commit(path_BP, n_B)
        if self.at_once:
            return
        left_B = self.len_B - self.blocks_B * BLOCK
        due_B = (self.len_B // BLOCK - 1).clamp(min=0) if first else (left_B >= 2 * BLOCK).long()
        for b, (done, due) in enumerate(zip(self.blocks_B.tolist(), due_B.tolist(), strict=True)):
            at = slice(done * BLOCK, (done + due) * BLOCK)
            for layer in range(len(self.k_LBGSD) if due else 0):
                here = (layer, b, slice(None), at)
                k_GSD, v_GSD = self.rounding.read(self.k_LBGSD[here], self.v_LBGSD[here])
                self.k_LBGSD[here], self.v_LBGSD[here] = k_GSD, v_GSD
        self.blocks_B = self.blocks_B + due_B

    def old_positions(self, n: int, sequence: int) -> int:
        """See `KVCache`: what is rounded by then."""
        return n if self.at_once else max(n // BLOCK - 1, 0) * BLOCK

    def old_rows(self, layer: int) -> list[list[tuple[Tensor, Tensor]]]:
        """See `KVCache`; the rows beyond the rounded ones are never asked for."""
        held = zip(self.k_LBGSD[layer], self.v_LBGSD[layer], strict=True)
        return [list(zip(k_GSD, v_GSD, strict=True)) for k_GSD, v_GSD in held]

    def commit_limit(self) -> Tensor | None:
        """Rows up to the point at which plain decoding would round a block."""
        return None if self.at_once else (self.blocks_B + 2) * BLOCK - self.len_B


def rounded(x_GSD: Tensor, axis: Axis, rounding: Rounding) -> Tensor:
    """What is read of rows once they are quantised.

    Args:
        x_GSD: keys or values; S a multiple of 128.
        axis: the axis of their groups.
        rounding: bits and split.

    Returns:
        The same shape, in x's dtype.
    """
    blocks = x_GSD.unflatten(-2, (-1, BLOCK))
    upper, lower, step, zero = quantise(blocks, -2 if axis is Axis.CHANNEL else -1, rounding.split)
    wide = torch.promote_types(x_GSD.dtype, torch.float32)
    u, s, z = upper.to(wide), step.to(wide), zero.to(wide)
    split = rounding.split
    if rounding.bits == 4:
        read = z + s * (u + split.upper_offset)
    else:
        read = z + s / 16 * (16 * u + lower.to(wide) - split.lower_offset)
    return read.flatten(-3, -2).to(x_GSD.dtype)
