"""Where new keys and values go.

Shapes: B batch, T new rows, S slots, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
