"""Finds what has to be moved where rows stand in slots and other rows are chosen.

A row that is chosen again keeps its slot; a row that is chosen anew takes the slot of one that is no longer
chosen, the first of them the first free slot. On CUDA one Triton kernel does what takes some thirty launches
in torch: it stands between the choice and the first row on the bus.

Shapes: B batch, X sets of a sequence, K slots of a set.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longtrain.kernels.devices import launched_on, runs_on
from longtrain.kernels.slot_changes import reference

__all__ = ["MOST_SLOTS", "SetSlots", "change"]

MOST_SLOTS = 8192
"""Slots of a set that the kernel serves; torch does more of them."""


@dataclass(frozen=True)
class SetSlots:
    """Slots of every set, and what its last choice changed; all are written in place.

    Args:
        row_BXK: the row in each slot, int64; -1: none. Rows fill the first slots without a gap.
        from_BXK: rows that the choice brought, the first `n_BX` of each list; the rest means nothing.
        to_BXK: slots that they take, likewise.
        n_BX: how many.
        full_loads: sets, counted, that were loaded anew although some of their rows were there.
        mark_BXK: the kernel's notes, int32.
    """

    row_BXK: Tensor
    from_BXK: Tensor
    to_BXK: Tensor
    n_BX: Tensor
    full_loads: Tensor
    mark_BXK: Tensor


def change(slots: SetSlots, idx_BXK: Tensor, n_B: Tensor, due_B: Tensor, *, most_moved: int) -> None:
    """Take in the sets of a choice.

    Args:
        slots: see `SetSlots`.
        idx_BXK: rows of each set, int64, ascending, the first `n_B` of them; never fewer than before.
        n_B: how many.
        due_B: sequences that were chosen for; sets of the others are as they were.
        most_moved: new rows of a set from which on all of it is loaded anew, into slots in the order of its
            rows; -1: at each choice, changed or not.
    """
    if not runs_on(idx_BXK.device) or idx_BXK.shape[-1] > MOST_SLOTS:
        reference.change(slots, idx_BXK, n_B, due_B, most_moved=most_moved)
        return
    import triton

    from longtrain.kernels.slot_changes.kernel import _change_kernel

    B, X, K = idx_BXK.shape
    width = triton.next_power_of_2(K)
    with launched_on(idx_BXK):
        _change_kernel[(B * X,)](
            slots.row_BXK, slots.from_BXK, slots.to_BXK, slots.n_BX, slots.full_loads, slots.mark_BXK,
            idx_BXK, n_B, due_B,
            *idx_BXK.stride(), X, K, most_moved,
            WIDTH=width, SEARCHES=width.bit_length(), num_warps=8 if width >= 1024 else 4,
        )  # fmt: skip
