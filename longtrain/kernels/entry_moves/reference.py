"""Reference implementation of `kernels.entry_moves` in plain torch. Shapes as there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longtrain.kernels.entry_moves import EntryLists, Pages


def move_entries(
    goal_LBGRPE: Tensor,
    source_LBGSPE: Tensor,
    lists: EntryLists,
    goal_pages: Pages | None,
    source_pages: Pages | None,
) -> None:
    """See `kernels.entry_moves.move_entries`."""
    for layer, sets_G in enumerate(lists.sets_LG):
        to_BGM, from_BGM = lists.to_BXM[:, sets_G], lists.from_BXM[:, sets_G]
        moved = (to_BGM >= 0) & (from_BGM >= 0)
        if lists.n_LBX is not None:
            entry_M = torch.arange(to_BGM.shape[-1], device=to_BGM.device)
            n_BX = lists.n_LBX[layer if len(lists.n_LBX) > 1 else 0]
            moved = moved & (entry_M < n_BX[:, sets_G, None])
        to_BGM, has_goal = _placed(to_BGM.clamp(min=0), goal_pages, layer)
        from_BGM, has_source = _placed(from_BGM.clamp(min=0), source_pages, layer)
        b, g, m = (moved & has_goal & has_source).nonzero(as_tuple=True)
        goal_LBGRPE[layer][b, g, to_BGM[b, g, m]] = source_LBGSPE[layer][b, g, from_BGM[b, g, m]]


def _placed(row_BGM: Tensor, pages: Pages | None, layer: int) -> tuple[Tensor, Tensor]:
    """Positions in the buffer by its page table, and a mask of the existing ones."""
    if pages is None:
        return row_BGM, torch.ones_like(row_BGM, dtype=torch.bool)
    page_BGM = pages.at_LC[layer][row_BGM // pages.size]
    return page_BGM.clamp(min=0) * pages.size + row_BGM % pages.size, page_BGM >= 0
