"""Choices one after another, by the kernel and by torch."""

import torch

from longtrain.kernels import top_entries
from longtrain.kernels.slot_assignment import SlotMap, reference


def same_as_torch(device, *, rows=20, length=90, steps=8):
    """Texts shorter and longer than a set, some not due, whole loads at some shares of new rows."""
    B, X = 3, 2
    for most_moved in (rows, rows // 3, -1):
        rng = torch.Generator().manual_seed(most_moved)
        both = [SlotMap(B, X, rows, most_moved=most_moved, device=device) for _ in range(2)]
        len_B = torch.tensor([rows // 2, rows - 1, length // 2])
        idx, n_B, moved = torch.zeros(B, X, rows, dtype=torch.int64), torch.zeros_like(len_B), 0
        for step in range(steps):
            due_B = (torch.rand(B, generator=rng) < 0.8) | (step == 0)
            scores = torch.rand(B, X, length, generator=rng) + 0.5 * (torch.arange(length) % 3 == 0)
            top_entries.reference.choose_entries(scores, len_B, idx, 2, 3, due_B)
            n_B = torch.where(due_B, len_B.clamp(max=rows), n_B)
            given = (idx.to(device), n_B.to(device), due_B.to(device))
            both[0].change(*given)
            reference.change(both[1], *given)
            one, other = both
            assert torch.equal(one.n_BX, other.n_BX) and torch.equal(one.full_loads, other.full_loads)
            assert torch.equal(one.row_BXK, other.row_BXK)
            counts = torch.arange(rows, device=device) < one.n_BX[..., None]
            for name in ("from_BXK", "to_BXK"):
                assert torch.equal(getattr(one, name)[counts], getattr(other, name)[counts])
            moved += int(one.n_BX.sum())
            len_B = (len_B + torch.tensor([1, 2, 0])).clamp(max=length)
        assert moved > 0 and (int(one.full_loads) > 0) == (most_moved < rows)
