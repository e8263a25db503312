"""Simulates an LRU buffer of KV entries: the number of entries it would load at each step.

Shapes: B batch, X sets, K entries of a set, S entries of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LruBuffer:
    """Counts the loads of a buffer that evicts the least recently used entry.

    Args:
        batch: sequences.
        n_sets: sets of each sequence.
        slots: capacity of a set's buffer, at least the entries of a set.
        rows: S.
        device: device of the counters.

    Source: SGLang's hierarchical sparse cache (device_buffer_size, by default twice the entries of a set).
    """

    def __init__(self, batch: int, n_sets: int, slots: int, *, rows: int, device: torch.device) -> None:
        self.slots, self._step = min(slots, rows), 0
        self._used_BXS = torch.full((batch, n_sets, rows), -1, dtype=torch.int64, device=device)

    def use(self, idx_BXK: Tensor, n_B: Tensor) -> Tensor:
        """Use the sets of a step; returns the number of entries of each that must be loaded, int64_BX."""
        B, X, K = idx_BXK.shape
        rows = self._used_BXS.shape[-1]
        order_BXS = self._used_BXS * rows + torch.arange(rows, device=idx_BXK.device)
        held_BXK = order_BXS.topk(self.slots, -1).indices
        here_BXS = torch.zeros_like(self._used_BXS, dtype=torch.bool).scatter_(2, held_BXK, True)
        here_BXS &= self._used_BXS >= 0
        counts_BXK = (torch.arange(K, device=idx_BXK.device) < n_B[:, None, None]).expand(B, X, K)
        missing_BX = (counts_BXK & ~here_BXS.gather(2, idx_BXK)).sum(-1)
        used = torch.nn.functional.pad(self._used_BXS, (0, 1))
        used.scatter_(2, torch.where(counts_BXK, idx_BXK, rows), self._step)
        self._used_BXS, self._step = used[..., :rows], self._step + 1
        return missing_BX
