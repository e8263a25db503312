"""Reference implementation of `kernels.slot_assignment` in plain torch. Shapes as there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longtrain.kernels.slot_assignment import SlotMap


def change(slots: SlotMap, idx_BXK: Tensor, n_B: Tensor, due_B: Tensor) -> None:
    """See `SlotMap.change`."""
    K = idx_BXK.shape[-1]
    slot_K = torch.arange(K, device=idx_BXK.device)
    chosen_BXK = (slot_K < n_B[:, None, None]).expand_as(idx_BXK)
    held_BXK = slots.row_BXK >= 0
    ascending_BXK = idx_BXK.masked_fill(~chosen_BXK, torch.iinfo(torch.int64).max)
    at_BXK = torch.searchsorted(ascending_BXK, slots.row_BXK)
    stays_BXK = held_BXK & (at_BXK < n_B[:, None, None])
    stays_BXK &= idx_BXK.gather(2, at_BXK.clamp(max=K - 1)) == slots.row_BXK
    marked = torch.zeros(*idx_BXK.shape[:2], K + 1, dtype=torch.bool, device=idx_BXK.device)
    marked.scatter_(2, torch.where(stays_BXK, at_BXK, K), True)
    fresh_BXK = chosen_BXK & ~marked[..., :K]
    whole_BX = (fresh_BXK.sum(-1) > slots.most_moved) & due_B[:, None]
    slots.full_loads.add_((whole_BX & held_BXK.any(-1)).sum())
    fresh_BXK = torch.where(whole_BX[..., None], chosen_BXK, fresh_BXK)
    stays_BXK = stays_BXK & ~whole_BX[..., None]
    slots.n_BX.copy_(fresh_BXK.sum(-1))
    slots.from_BXK.copy_(_first(idx_BXK, fresh_BXK))
    slots.to_BXK.copy_(_first(slot_K.expand_as(idx_BXK), ~stays_BXK))
    counts_BXK = slot_K < slots.n_BX[..., None]
    after = torch.nn.functional.pad(torch.where(stays_BXK, slots.row_BXK, -1), (0, 1))
    after.scatter_(2, torch.where(counts_BXK, slots.to_BXK, K), slots.from_BXK)
    slots.row_BXK.copy_(after[..., :K])


def _first(x_BXK: Tensor, mask_BXK: Tensor) -> Tensor:
    """Compact each list's masked entries to its beginning, in order; the rest is undefined."""
    K = x_BXK.shape[-1]
    place_BXK = torch.where(mask_BXK, mask_BXK.cumsum(-1) - 1, K)
    found = torch.zeros(*x_BXK.shape[:2], K + 1, dtype=x_BXK.dtype, device=x_BXK.device)
    return found.scatter_(2, place_BXK, x_BXK)[..., :K]
