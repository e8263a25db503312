"""Which rows stand in which resident slots, and what has to be moved when other rows are chosen.

A row that is chosen again keeps its slot; a row that is chosen anew takes the slot of one that is no longer
chosen. Attention does not mind the order of slots, since keys are stored rotated.
Source: SpeContext (arXiv 2512.00722) §5: S_last, S_now, and the differences between them.
Note: the paper prints the difference of a set with itself at one place (S_pre); S_last is meant.

Shapes: B batch, X sets of a sequence, K slots of a set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.slot_changes import SetSlots, change


class SlotMap:
    """The slots of every set. Everything lies on the device and is updated in place.

    Rows of a set fill its first slots without a gap: sets never shrink.

    Args:
        batch: sequences.
        n_sets: sets of each.
        slots: K.
        most_moved: new rows of a set from which on all of it is loaded anew, into slots in the order of its
            rows, and counted (`full_loads`); K: never. -1: at each choice, changed or not.
        device: where everything lies.
    """

    def __init__(self, batch: int, n_sets: int, slots: int, *, most_moved: int, device: torch.device) -> None:
        self.most_moved = most_moved
        self.row_BXK = torch.full((batch, n_sets, slots), -1, dtype=torch.int64, device=device)
        """The row in each slot; -1: none."""
        self.from_BXK = torch.zeros_like(self.row_BXK)
        """Rows that the last choice brought, the first `n_BX` of each list; the rest means nothing."""
        self.to_BXK = torch.zeros_like(self.row_BXK)
        """Slots that they take, likewise."""
        self.n_BX = torch.zeros(batch, n_sets, dtype=torch.int64, device=device)
        self.full_loads = torch.zeros((), dtype=torch.int64, device=device)
        """Sets that were loaded anew although some of their rows were there."""
        self._mark_BXK = torch.zeros_like(self.row_BXK, dtype=torch.int32)

    def change(self, idx_BXK: Tensor, n_B: Tensor, due_B: Tensor) -> None:
        """Take in the sets of a choice.

        Args:
            idx_BXK: rows of each set, ascending, the first `n_B` of them; never fewer than before.
            n_B: how many.
            due_B: sequences that were chosen for; sets of the others are as they were.
        """
        slots = SetSlots(self.row_BXK, self.from_BXK, self.to_BXK, self.n_BX, self.full_loads, self._mark_BXK)
        change(slots, idx_BXK, n_B, due_B, most_moved=self.most_moved)

    def tensors(self) -> tuple[Tensor, ...]:
        """What steps read and write."""
        return self.row_BXK, self.from_BXK, self.to_BXK, self.n_BX, self.full_loads, self._mark_BXK

    def bytes(self) -> int:
        """Bytes of the map and of its lists."""
        return sum(tensor.nbytes for tensor in self.tensors())
