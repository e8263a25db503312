"""Triton kernel of `kernels.slot_assignment`, and its launch. Shapes as there."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from longtrain.kernels.devices import launched_on

if TYPE_CHECKING:
    from longtrain.kernels.slot_assignment import SlotMap


@triton.jit(do_not_specialize=["most_moved"])
def _change_kernel(
    row_ptr, from_ptr, to_ptr, n_ptr, full_ptr, mark_ptr, idx_ptr, count_ptr, due_ptr,
    idx_b, idx_x, idx_k, X, K, most_moved,
    WIDTH: tl.constexpr, SEARCHES: tl.constexpr,
):  # fmt: skip
    """Update the slots of one set."""
    one = tl.program_id(0).to(tl.int64)
    b, x = one // X, one % X
    idx_ptr += b * idx_b + x * idx_x
    row_ptr += one * K
    from_ptr += one * K
    to_ptr += one * K
    mark_ptr += one * K
    k = tl.arange(0, WIDTH)
    inside = k < K
    count = tl.load(count_ptr + b).to(tl.int32)
    due = tl.load(due_ptr + b).to(tl.int32)
    tl.store(mark_ptr + k, 0, mask=inside)

    # binary search of each slot's entry in the new set, which is ascending
    held_row = tl.load(row_ptr + k, mask=inside, other=-1)
    low, high = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32) + count
    for _ in range(SEARCHES):
        middle = (low + high) // 2
        open_ = low < high
        less = tl.load(idx_ptr + middle * idx_k, mask=open_, other=0) < held_row
        low = tl.where(open_ & less, middle + 1, low)
        high = tl.where(open_ & (less == 0), middle, high)
    held = held_row >= 0
    found = tl.load(idx_ptr + low * idx_k, mask=low < count, other=-1)
    stays = held & (found == held_row)
    # mark the new set's entries that are present already; barriers, as other threads read these marks
    tl.debug_barrier()
    tl.store(mark_ptr + low, 1, mask=stays)
    tl.debug_barrier()

    chosen = k < count
    fresh = chosen & (tl.load(mark_ptr + k, mask=inside, other=1) == 0)
    whole = (tl.sum(fresh.to(tl.int32)) > most_moved) & (due != 0)
    tl.atomic_add(full_ptr, 1, mask=whole & (tl.max(held.to(tl.int32)) > 0))
    fresh = tl.where(whole, chosen, fresh)
    stays = stays & (whole == 0)
    moved = tl.sum(fresh.to(tl.int32))
    tl.store(n_ptr + one, moved)
    # compact: the entries to load, then the free slots, both in ascending order
    row = tl.load(idx_ptr + k * idx_k, mask=chosen, other=0)
    tl.store(from_ptr + tl.cumsum(fresh.to(tl.int32)) - 1, row, mask=fresh)
    free = inside & (stays == 0)
    place = tl.cumsum(free.to(tl.int32)) - 1
    tl.store(to_ptr + place, k.to(tl.int64), mask=free)
    tl.debug_barrier()
    # the i-th free slot takes the i-th entry to load
    comes = free & (place < moved)
    new = tl.load(from_ptr + place, mask=comes, other=-1)
    tl.store(row_ptr + k, tl.where(stays, held_row, new), mask=inside)


def change(slots: SlotMap, idx_BXK: Tensor, n_B: Tensor, due_B: Tensor) -> None:
    """See `SlotMap.change`."""
    B, X, K = idx_BXK.shape
    width = triton.next_power_of_2(K)
    with launched_on(idx_BXK):
        _change_kernel[(B * X,)](
            slots.row_BXK, slots.from_BXK, slots.to_BXK, slots.n_BX, slots.full_loads, slots.mark_BXK,
            idx_BXK, n_B, due_B,
            *idx_BXK.stride(), X, K, slots.most_moved,
            WIDTH=width, SEARCHES=width.bit_length(), num_warps=8 if width >= 1024 else 4,
        )  # fmt: skip
