"""Where new rows stand in their texts, and where their keys and values go.

Shapes: B batch, T new rows, S slots, G KV heads, D head dim, F = D / 2 angles of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Angles:
    """A rotary embedding whose frequencies do not depend on the length of a text.

    Args:
        frequency_F: radians a position, fp32.
        scaling: factor on cos and sin.
    """

    frequency_F: Tensor
    scaling: float


Rotation: TypeAlias = Angles | Callable[[Tensor], tuple[Tensor, Tensor]]
"""A rotary embedding as constants, or as what gives cos and sin [..., D] of positions."""


@dataclass(frozen=True)
class RowPositions:
    """Positions of the rows of a step, which a kernel adds up itself.

    Args:
        pos_BT: int64, of any strides.
        ahead: added to all of them.
        steps: whether row t stands t positions further.
    """

    pos_BT: Tensor
    ahead: int = 0
    steps: bool = False

    @classmethod
    def after(cls, pos_B: Tensor, rows: int, *, ahead: int = 0, steps: bool = False) -> RowPositions:
        """Rows of each sequence at one position, or from it on."""
        return cls(pos_B[:, None].expand(-1, rows), ahead, steps)

    def sum(self) -> Tensor:
        """The positions as one tensor, int64_BT."""
        if not self.steps:
            return self.pos_BT + self.ahead if self.ahead else self.pos_BT
        rows, device = self.pos_BT.shape[1], self.pos_BT.device
        return self.pos_BT + torch.arange(self.ahead, self.ahead + rows, device=device)


@dataclass(frozen=True)
class Slots:
    """Where the new rows of a step go in a layer's buffers: row t to slot `slot_B[b] + at + t`.

    Args:
        k_BGSD: buffer of keys, any strides but 1 in the last dim.
        v_BGSD: buffer of values, likewise.
        slot_B: first slot of each sequence, int64, on the device; nothing checks there that all rows fit.
        at: slots after it.
        wrap: slots of a ring, which a slot's number is taken modulo; None: it is no ring.
        fixed: slots in front of a ring that it never comes round to; the ring's numbers count from there.
        count_B: rows of each sequence that are stored, int64, on the device; None: all.
    """

    k_BGSD: Tensor
    v_BGSD: Tensor
    slot_B: Tensor
    at: int = 0
    wrap: int | None = None
    count_B: Tensor | None = None
    fixed: int = 0

    def rows(self, count: int) -> Tensor:
        """slot_BT of so many rows."""
        slot_BT = self.slot_B[:, None] + torch.arange(self.at, self.at + count, device=self.slot_B.device)
        if self.wrap is None:
            return slot_BT
        if not self.fixed:
            return slot_BT % self.wrap
        return slot_BT.where(slot_BT < self.fixed, self.fixed + (slot_BT - self.fixed) % self.wrap)
