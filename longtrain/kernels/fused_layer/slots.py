"""Positions of new tokens, and the buffer positions of their keys and values.

Shapes: B batch, T new tokens, S buffer positions, G KV heads, D head dim, F = D / 2 angles of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Angles:
    """A rotary embedding whose frequencies do not depend on the length of the sequence.

    Args:
        frequency_F: radians per position, fp32.
        scaling: factor on cos and sin.
    """

    frequency_F: Tensor
    scaling: float


Rotation: TypeAlias = Angles | Callable[[Tensor], tuple[Tensor, Tensor]]
"""A rotary embedding: its constants, or a function from positions to cos and sin [..., D]."""


@dataclass(frozen=True)
class RowPositions:
    """Positions of the tokens of a step, as operands from which a kernel computes them.

    Args:
        pos_BT: int64, of any strides.
        ahead: added to all of them.
        steps: True if t is added to the position of token t as well.
    """

    pos_BT: Tensor
    ahead: int = 0
    steps: bool = False

    @classmethod
    def after(cls, pos_B: Tensor, rows: int, *, ahead: int = 0, steps: bool = False) -> RowPositions:
        """Positions of `rows` tokens of each sequence: all `pos_B`, or with `steps` consecutive from it."""
        return cls(pos_B[:, None].expand(-1, rows), ahead, steps)

    def sum(self) -> Tensor:
        """The positions as one tensor, int64_BT."""
        if not self.steps:
            return self.pos_BT + self.ahead if self.ahead else self.pos_BT
        rows, device = self.pos_BT.shape[1], self.pos_BT.device
        return self.pos_BT + torch.arange(self.ahead, self.ahead + rows, device=device)


@dataclass(frozen=True)
class Slots:
    """Buffer positions of a step's new entries in a layer: token t at `slot_B[b] + at + t`.

    Args:
        k_BGSD: buffer of keys, last dim contiguous.
        v_BGSD: buffer of values, likewise.
        slot_B: first position of each sequence, int64, on the device; the caller checks that all tokens fit.
            Where heads have different numbers of entries: of each sequence and KV head, [B, G], in one buffer
            [S, D] of all heads, which `k_BGSD` and `v_BGSD` are expanded from; then all tokens are stored.
        at: offset added to it.
        wrap: size of a ring buffer: positions are taken modulo this; None: no ring.
        fixed: number of positions before the ring that are never overwritten (sinks); the ring starts after
            them.
        count_B: number of tokens of each sequence that are stored, int64, on the device; None: all.
    """

    k_BGSD: Tensor
    v_BGSD: Tensor
    slot_B: Tensor
    at: int = 0
    wrap: int | None = None
    count_B: Tensor | None = None
    fixed: int = 0

    @property
    def per_head(self) -> bool:
        """True if each KV head has positions of its own."""
        return self.slot_B.dim() == 2

    def rows(self, count: int) -> Tensor:
        """slot_BT, buffer positions of `count` tokens, or slot_BGT (`per_head`)."""
        slot_BT = self.slot_B[..., None] + torch.arange(self.at, self.at + count, device=self.slot_B.device)
        if self.wrap is None:
            return slot_BT
        if not self.fixed:
            return slot_BT % self.wrap
        return slot_BT.where(slot_BT < self.fixed, self.fixed + (slot_BT - self.fixed) % self.wrap)
