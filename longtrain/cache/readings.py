"""Caches for measuring what quantised keys and values cost.

`UpperHalfCache` lets the target read what a draft reads. `RoundedCache` serves choices that no kernel serves:
it keeps every row in full precision and writes back, for the tokens that a hierarchical cache would have
quantised, what such a cache would read.

Shapes: L layers, B batch, T new rows, S slots, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from longtrain.cache.base import Mask
from longtrain.cache.dense import DenseCache
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.errors import ConfigError, refusal
from longtrain.kernels.hierarchical.layout import BLOCK, Split
from longtrain.kernels.hierarchical.reference import quantise


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
        dtype: dtype of the model.
        sizes: see `DenseCache`.
    """

    def __init__(self, *, rounding: Rounding, dtype: torch.dtype, **sizes: Any) -> None:
        super().__init__(dtype=torch.promote_types(dtype, torch.float32), **sizes)
        self.rounding = rounding
        self.blocks_B = torch.zeros_like(self.len_B)

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See `DenseCache`."""
        kind = self.k_LBGSD.dtype
        super().write(layer, k_BGTD.to(kind), v_BGTD.to(kind))

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """See `DenseCache`; in the rows' precision."""
        out, lse = super().attend(layer, q_BHTD.to(self.k_LBGSD.dtype), mask=mask, scale=scale)
        return out.to(q_BHTD.dtype), lse

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Accept rows, and round those whose time has come; asks the host for lengths."""
        first = not bool(self.len_B.any())
        super().commit(path_BP, n_B)
        left_B = self.len_B - self.blocks_B * BLOCK
        due_B = (self.len_B // BLOCK - 1).clamp(min=0) if first else (left_B >= 2 * BLOCK).long()
        for b, (done, due) in enumerate(zip(self.blocks_B.tolist(), due_B.tolist(), strict=True)):
            at = slice(done * BLOCK, (done + due) * BLOCK)
            for layer in range(len(self.k_LBGSD) if due else 0):
                for rows, axis in ((self.k_LBGSD, self.rounding.keys), (self.v_LBGSD, self.rounding.values)):
                    rows[layer, b, :, at] = rounded(rows[layer, b, :, at], axis, self.rounding)
        self.blocks_B = self.blocks_B + due_B

    def old_positions(self, n: int, sequence: int) -> int:
        """See `KVCache`: the blocks that are rounded by then."""
        return max(n // BLOCK - 1, 0) * BLOCK

    def old_rows(self, layer: int) -> list[list[tuple[Tensor, Tensor]]]:
        """See `KVCache`; the rows beyond the rounded ones are never asked for."""
        held = zip(self.k_LBGSD[layer], self.v_LBGSD[layer], strict=True)
        return [list(zip(k_GSD, v_GSD, strict=True)) for k_GSD, v_GSD in held]

    def commit_limit(self) -> Tensor:
        """Rows up to the point at which plain decoding would round a block."""
        return (self.blocks_B + 2) * BLOCK - self.len_B


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
