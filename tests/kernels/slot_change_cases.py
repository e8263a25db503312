"""Choices one after another, by the kernel and by torch."""

import torch

from longtrain.cache.row_sets import ReadBudget, choose_rows
from longtrain.kernels import slot_changes
from longtrain.kernels.slot_changes import SetSlots, reference


def fresh_slots(B, X, K, device):
    def full(value, *size, dtype=torch.int64):
        return torch.full(size, value, dtype=dtype, device=device)

    lists = full(-1, B, X, K), full(0, B, X, K), full(0, B, X, K)
    return SetSlots(*lists, full(0, B, X), full(0), full(0, B, X, K, dtype=torch.int32))


def same_as_torch(device, *, rows=20, length=90, steps=8):
    """Texts shorter and longer than a set, some not due, whole loads at some shares of new rows."""
    B, X = 3, 2
    for most_moved in (rows, rows // 3, -1):
        coins = torch.Generator().manual_seed(most_moved)
        both = fresh_slots(B, X, rows, device), fresh_slots(B, X, rows, device)
        budget, len_B = ReadBudget(rows, 2, 3), torch.tensor([rows // 2, rows - 1, length // 2])
        idx, n_B, moved = torch.zeros(B, X, rows, dtype=torch.int64), torch.zeros_like(len_B), 0
        for step in range(steps):
            due_B = (torch.rand(B, generator=coins) < 0.8) | (step == 0)
            scores = torch.rand(B, X, length, generator=coins) + 0.5 * (torch.arange(length) % 3 == 0)
            idx = torch.where(due_B[:, None, None], choose_rows(scores, len_B, budget), idx)
            n_B = torch.where(due_B, len_B.clamp(max=rows), n_B)
            given = (idx.to(device), n_B.to(device), due_B.to(device))
            slot_changes.change(both[0], *given, most_moved=most_moved)
            reference.change(both[1], *given, most_moved=most_moved)
            one, other = both
            assert torch.equal(one.n_BX, other.n_BX) and torch.equal(one.full_loads, other.full_loads)
            assert torch.equal(one.row_BXK, other.row_BXK)
            counts = torch.arange(rows, device=device) < one.n_BX[..., None]
            for name in ("from_BXK", "to_BXK"):
                assert torch.equal(getattr(one, name)[counts], getattr(other, name)[counts])
            moved += int(one.n_BX.sum())
            len_B = (len_B + torch.tensor([1, 2, 0])).clamp(max=length)
        assert moved > 0 and (int(one.full_loads) > 0) == (most_moved < rows)
