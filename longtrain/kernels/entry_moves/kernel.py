"""Triton kernel of `kernels.entry_moves`, and its launch. Shapes as there."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from longtrain.kernels.devices import launched_on

if TYPE_CHECKING:
    from longtrain.kernels.entry_moves import EntryLists, Pages, Programs


@triton.jit
def _placed(row, page_ptr, inside, SIZE: tl.constexpr):
    """Positions in the buffer by its page table, and a mask of the existing ones; SIZE 0: not paged."""
    inside = inside & (row >= 0)
    if SIZE > 0:
        page = tl.load(page_ptr + row // SIZE, mask=inside, other=-1)
        inside = inside & (page >= 0)
        row = page * SIZE + row % SIZE
    return row, inside


@triton.jit(do_not_specialize=["ONES", "M"])
def _move_kernel(
    goal_ptr, source_ptr, to_ptr, from_ptr, set_ptr, n_ptr, goal_page_ptr, source_page_ptr,
    goal_l, goal_b, goal_g, goal_r, goal_p, source_l, source_b, source_g, source_r, source_p,
    to_b, to_x, to_m, from_b, from_x, from_m, set_l, set_g, n_l, n_b, n_x, goal_page_l, source_page_l,
    ONES, B, G, M,
    P: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr,
    GOAL_SIZE: tl.constexpr, SOURCE_SIZE: tl.constexpr,
):  # fmt: skip
    """Move some index pairs of some lists, each for one layer, sequence and KV head, layer by layer."""
    at = tl.arange(0, WIDTH)
    goal_at, source_at = at, at
    if P > 1:
        part = (at // E).to(tl.int64)
        goal_at, source_at = part * goal_p + at % E, part * source_p + at % E
    first = tl.program_id(1) * ROWS
    for one in range(tl.program_id(0), ONES, tl.num_programs(0)):
        layer, b, g = (one // (B * G)).to(tl.int64), (one // G % B).to(tl.int64), (one % G).to(tl.int64)
        x = tl.load(set_ptr + layer * set_l + g * set_g)
        n = M
        if COUNTED:
            n = tl.minimum(tl.load(n_ptr + layer * n_l + b * n_b + x * n_x), M).to(tl.int32)
        to_row_ptr = to_ptr + b * to_b + x * to_x
        from_row_ptr = from_ptr + b * from_b + x * from_x
        goal_row_ptr = goal_ptr + layer * goal_l + b * goal_b + g * goal_g
        source_row_ptr = source_ptr + layer * source_l + b * source_b + g * source_g
        for start in range(first, n, tl.num_programs(1) * ROWS):
            entry = start + tl.arange(0, ROWS)
            inside = entry < n
            to = tl.load(to_row_ptr + entry * to_m, mask=inside, other=-1)
            source = tl.load(from_row_ptr + entry * from_m, mask=inside, other=-1)
            to, inside = _placed(to, goal_page_ptr + layer * goal_page_l, inside, GOAL_SIZE)
            source, inside = _placed(source, source_page_ptr + layer * source_page_l, inside, SOURCE_SIZE)
            keep = inside[:, None] & (at < P * E)[None, :]
            row = tl.load(source_row_ptr + source[:, None] * source_r + source_at[None, :], mask=keep)
            tl.store(goal_row_ptr + to[:, None] * goal_r + goal_at[None, :], row, mask=keep)


_TILE = 4096
"""Numbers that a program moves at once if `Programs` sets no limit."""


def move_entries(
    goal_LBGRPE: Tensor,
    source_LBGSPE: Tensor,
    lists: EntryLists,
    goal_pages: Pages | None,
    source_pages: Pages | None,
    programs: Programs | None,
) -> None:
    """See `kernels.entry_moves.move_entries`."""
    L, B, G, _, P, E = goal_LBGRPE.shape
    M = lists.to_BXM.shape[-1]
    if not (L and B and G and M):
        return
    ones, width = L * B * G, triton.next_power_of_2(P * E)
    tile = _TILE if programs is None else programs.numbers
    rows = min(triton.next_power_of_2(M), max(1, tile // width))
    grid = (ones, triton.cdiv(M, rows))
    if programs is not None:
        grid = (min(ones, programs.most), min(grid[1], max(1, programs.most // ones)))
    some = lists.to_BXM  # any tensor, passed for pointers that are not read
    counts, goal_at, source_at = lists.n_LBX, goal_pages, source_pages
    with launched_on(lists.to_BXM):
        _move_kernel[grid](
            goal_LBGRPE, source_LBGSPE, lists.to_BXM, lists.from_BXM, lists.sets_LG,
            some if counts is None else counts,
            some if goal_at is None else goal_at.at_LC,
            some if source_at is None else source_at.at_LC,
            *goal_LBGRPE.stride()[:5], *source_LBGSPE.stride()[:5],
            *lists.to_BXM.stride(), *lists.from_BXM.stride(), *lists.sets_LG.stride(),
            *((0, 0, 0) if counts is None else _over_layers(counts)),
            0 if goal_at is None else goal_at.at_LC.stride(0),
            0 if source_at is None else source_at.at_LC.stride(0),
            ones, B, G, M,
            P=P, E=E, WIDTH=width, ROWS=rows, COUNTED=counts is not None,
            GOAL_SIZE=0 if goal_at is None else goal_at.size,
            SOURCE_SIZE=0 if source_at is None else source_at.size,
            num_warps=min(8, max(1, tile // 1024)),
        )  # fmt: skip


def _over_layers(n_LBX: Tensor) -> tuple[int, ...]:
    """Strides of the counts; 0 over layers where all layers share them."""
    layer, b, x = n_LBX.stride()
    return layer if len(n_LBX) > 1 else 0, b, x
