"""Sets of rows that change from step to step by a given share, and what an LRU buffer would load for them.

No head need be trained; which rows come anew is random, so they lie scattered, as they do for a head.

Shapes: B batch, X sets, K rows of a set, S rows of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.cache.row_sets import ReadBudget
from longtrain.decoding.retrieval.selector import Selector
from longtrain.targets.model import Target


class OverlapSelector(Selector):
    """Chooses a given share of the rows of the last set again, and others at random.

    Args:
        budget: see `Selector`.
        target: whose layers share a set for each KV head.
        overlap: the share.
    """

    name = "overlap"

    def __init__(self, budget: ReadBudget, target: Target, overlap: float) -> None:
        super().__init__(budget)
        info = target.info
        self.table_LG = torch.arange(info.n_kv_heads).expand(info.n_layers, -1)
        self.overlap = overlap

    def ahead(self, root_B: Tensor) -> Tensor:
        """See `Selector`."""
        assert self.cache is not None and self.cache.row_sets is not None
        sets = self.cache.row_sets
        return overlapping(sets.idx_BXK, sets.n_B, self.cache.used, self.overlap)

    def tensors(self) -> tuple[Tensor, ...]:
        """It has no state but the sets."""
        return ()


def overlapping(idx_BXK: Tensor, n_B: Tensor, rows: int, overlap: float) -> Tensor:
    """Scores by which a share of some sets is chosen again, and other rows at random."""
    B, X, K = idx_BXK.shape
    scores_BXS = torch.rand(B, X, rows + 1, device=idx_BXK.device)
    again_BXK = torch.where(torch.rand(B, X, K, device=idx_BXK.device) < overlap, 2.0, -1.0)
    counts_BXK = (torch.arange(K, device=idx_BXK.device) < n_B[:, None, None]).expand(B, X, K)
    return scores_BXS.scatter_(2, torch.where(counts_BXK, idx_BXK, rows), again_BXK)[..., :rows]


class LruBuffer:
    """Counts what a buffer of a set's latest rows would load: the rows used least lately make room.

    Args:
        batch: sequences.
        n_sets: sets of each.
        slots: rows that the buffer of a set holds, at least those of a set.
        rows: S.
        device: where it counts.

    Source: SGLang's hierarchical sparse cache (device_buffer_size, by default twice the rows of a set).
    """

    def __init__(self, batch: int, n_sets: int, slots: int, *, rows: int, device: torch.device) -> None:
        self.slots, self._step = min(slots, rows), 0
        self._used_BXS = torch.full((batch, n_sets, rows), -1, dtype=torch.int64, device=device)

    def use(self, idx_BXK: Tensor, n_B: Tensor) -> int:
        """Take in the sets of a step, and say how many rows were not there; waits for the device."""
        B, X, K = idx_BXK.shape
        rows = self._used_BXS.shape[-1]
        order_BXS = self._used_BXS * rows + torch.arange(rows, device=idx_BXK.device)
        held_BXK = order_BXS.topk(self.slots, -1).indices
        here_BXS = torch.zeros_like(self._used_BXS, dtype=torch.bool).scatter_(2, held_BXK, True)
        here_BXS &= self._used_BXS >= 0
        counts_BXK = (torch.arange(K, device=idx_BXK.device) < n_B[:, None, None]).expand(B, X, K)
        missing = int((counts_BXK & ~here_BXS.gather(2, idx_BXK)).sum())
        used = torch.nn.functional.pad(self._used_BXS, (0, 1))
        used.scatter_(2, torch.where(counts_BXK, idx_BXK, rows), self._step)
        self._used_BXS, self._step = used[..., :rows], self._step + 1
        return missing
