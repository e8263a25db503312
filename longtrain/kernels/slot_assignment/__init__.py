"""Assigns buffer slots to a newly chosen set of KV entries, moving as few entries as possible.

An entry that is chosen again keeps its slot. A new entry takes the slot of one that is no longer chosen, in
order. Attention does not depend on the order of slots, since keys are stored after RoPE. On CUDA one Triton
kernel replaces some thirty launches of torch: transfers from the host cannot start before it has run.

Source: SpeContext (arXiv 2512.00722) §5: S_last, S_now, and the differences between them.
Note: the paper prints the difference of a set with itself in one place (S_pre); S_last is meant.

Shapes: B batch, X sets of a sequence, K slots of a set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.devices import runs_on
from longtrain.kernels.slot_assignment import reference

__all__ = ["MOST_SLOTS", "SlotMap"]

MOST_SLOTS = 8192
"""Most slots of a set that the kernel supports; larger sets use the reference implementation."""


class SlotMap:
    """The slots of every set. All tensors are on the device and are updated in place.

    Args:
        batch: sequences.
        n_sets: sets of each sequence.
        slots: K.
        most_moved: a set with more new entries than this is loaded whole, into slots in ascending order; K:
            never; -1: always, changed or not.
        device: device of the tensors.
    """

    def __init__(self, batch: int, n_sets: int, slots: int, *, most_moved: int, device: torch.device) -> None:
        self.most_moved = most_moved
        self.row_BXK = torch.full((batch, n_sets, slots), -1, dtype=torch.int64, device=device)
        """The entry in each slot; -1: empty. Only the last slots are empty, since sets never shrink."""
        self.from_BXK = torch.zeros_like(self.row_BXK)
        """Entries that the last change must load, the first `n_BX` of each list; the rest is undefined."""
        self.to_BXK = torch.zeros_like(self.row_BXK)
        """The slots that they take, likewise."""
        self.n_BX = torch.zeros(batch, n_sets, dtype=torch.int64, device=device)
        self.full_loads = torch.zeros((), dtype=torch.int64, device=device)
        """Number of sets that were loaded whole although some of their entries were present."""
        self.mark_BXK = torch.zeros_like(self.row_BXK, dtype=torch.int32)
        """Scratch of the kernel."""

    def change(self, idx_BXK: Tensor, n_B: Tensor, due_B: Tensor) -> None:
        """Assign slots to newly chosen sets.

        Args:
            idx_BXK: entries of each set, int64, ascending, the first `n_B` of them; never fewer than before.
            n_B: number of entries of each set.
            due_B: bool mask of the sequences with new sets; the sets of the others are unchanged.
        """
        if not runs_on(idx_BXK.device) or idx_BXK.shape[-1] > MOST_SLOTS:
            reference.change(self, idx_BXK, n_B, due_B)
            return
        from longtrain.kernels.slot_assignment import kernel

        kernel.change(self, idx_BXK, n_B, due_B)

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that decoding steps read and write."""
        return self.row_BXK, self.from_BXK, self.to_BXK, self.n_BX, self.full_loads, self.mark_BXK

    def bytes(self) -> int:
        """Bytes of the map and of its lists."""
        return sum(tensor.nbytes for tensor in self.tensors())
