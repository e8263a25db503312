"""Which rows stand in which resident slots, and what has to be moved when other rows are chosen.

A row that is chosen again keeps its slot; a row that is chosen anew takes the slot of one that is no longer
chosen. Attention does not mind the order of slots, since keys are stored rotated.
Source: SpeContext (arXiv 2512.00722) §5: S_last, S_now, and the differences between them.
Note: the paper prints the difference of a set with itself at one place (S_pre); S_last is meant.

Shapes: B batch, X sets of a sequence, K slots of a set, S rows of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlotMap:
    """The slots of every set. Everything lies on the device and is updated in place.

    Rows of a set fill its first slots without a gap: sets never shrink.

    Args:
        batch: sequences.
        n_sets: sets of each.
        slots: K.
        rows: S, most rows of a sequence.
        most_moved: new rows of a set from which on all of it is loaded anew, into slots in the order of its
            rows, and counted (`full_loads`); K: never. -1: at each choice, changed or not.
        device: where everything lies.
    """

    def __init__(
        self, batch: int, n_sets: int, slots: int, *, rows: int, most_moved: int, device: torch.device
    ) -> None:
        self.most_moved = most_moved
        self._rows = rows
        self.row_BXK = torch.full((batch, n_sets, slots), -1, dtype=torch.int64, device=device)
        """The row in each slot; -1: none."""
        self.from_BXK = torch.zeros_like(self.row_BXK)
        """Rows that the last choice brought, the first `n_BX` of each list; the rest means nothing."""
        self.to_BXK = torch.zeros_like(self.row_BXK)
        """Slots that they take, likewise."""
        self.n_BX = torch.zeros(batch, n_sets, dtype=torch.int64, device=device)
        self.full_loads = torch.zeros((), dtype=torch.int64, device=device)
        """Sets that were loaded anew although some of their rows were there."""
        self._slot_K = torch.arange(slots, device=device)

    def change(self, idx_BXK: Tensor, n_B: Tensor, due_B: Tensor) -> None:
        """Take in the sets of a choice.

        Args:
            idx_BXK: rows of each set, ascending, the first `n_B` of them; never fewer than before.
            n_B: how many.
            due_B: sequences that were chosen for; sets of the others are as they were.
        """
        K = len(self._slot_K)
        chosen_BXK = (self._slot_K < n_B[:, None, None]).expand_as(idx_BXK)
        held_BXK = self.row_BXK >= 0
        fresh_BXK = chosen_BXK & ~self._named(self.row_BXK, held_BXK).gather(2, idx_BXK)
        stays_BXK = held_BXK & self._named(idx_BXK, chosen_BXK).gather(2, self.row_BXK.clamp(min=0))
        whole_BX = (fresh_BXK.sum(-1) > self.most_moved) & due_B[:, None]
        self.full_loads += (whole_BX & held_BXK.any(-1)).sum()
        fresh_BXK = torch.where(whole_BX[..., None], chosen_BXK, fresh_BXK)
        stays_BXK = stays_BXK & ~whole_BX[..., None]
        self.n_BX.copy_(fresh_BXK.sum(-1))
        self.from_BXK.copy_(_first(idx_BXK, fresh_BXK))
        self.to_BXK.copy_(_first(self._slot_K.expand_as(idx_BXK), ~stays_BXK))
        counts_BXK = self._slot_K < self.n_BX[..., None]
        after = torch.nn.functional.pad(torch.where(stays_BXK, self.row_BXK, -1), (0, 1))
        after.scatter_(2, torch.where(counts_BXK, self.to_BXK, K), self.from_BXK)
        self.row_BXK.copy_(after[..., :K])

    def tensors(self) -> tuple[Tensor, ...]:
        """What steps read and write."""
        return self.row_BXK, self.from_BXK, self.to_BXK, self.n_BX, self.full_loads

    def bytes(self) -> int:
        """Bytes of the map and of its lists."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def _named(self, row_BXK: Tensor, counts_BXK: Tensor) -> Tensor:
        """Rows that are among some, bool_BXS; one more column takes what does not count."""
        seen = torch.zeros(*row_BXK.shape[:2], self._rows + 1, dtype=torch.bool, device=row_BXK.device)
        return seen.scatter_(2, torch.where(counts_BXK, row_BXK, self._rows), True)


def _first(x_BXK: Tensor, wanted_BXK: Tensor) -> Tensor:
    """The wanted ones of each list at its beginning, in their order; what follows means nothing."""
    K = x_BXK.shape[-1]
    place_BXK = torch.where(wanted_BXK, wanted_BXK.cumsum(-1) - 1, K)
    found = torch.zeros(*x_BXK.shape[:2], K + 1, dtype=x_BXK.dtype, device=x_BXK.device)
    return found.scatter_(2, place_BXK, x_BXK)[..., :K]
