"""Launches the Triton kernel of `kernels.row_moves`. Shapes as there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from torch import Tensor

from longtrain.kernels.devices import launched_on
from longtrain.kernels.row_moves.kernel import _move_kernel

if TYPE_CHECKING:
    from longtrain.kernels.row_moves import Pages, Programs, RowLists


_TILE = 4096
"""Numbers that each of many programs moves at once."""


def move_rows(
    goal_LBGRPE: Tensor,
    source_LBGSPE: Tensor,
    lists: RowLists,
    goal_pages: Pages | None,
    source_pages: Pages | None,
    programs: Programs | None,
) -> None:
    """See `kernels.row_moves.move_rows`."""
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
    some = lists.to_BXM  # stands in for pointers that are not read
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
    """Its strides; 0 over layers where all have the same counts."""
    layer, b, x = n_LBX.stride()
    return layer if len(n_LBX) > 1 else 0, b, x
