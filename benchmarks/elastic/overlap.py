"""A selector whose sets of KV entries change from step to step by a given share.

No retrieval head is needed. New entries are random, and therefore scattered, as with a trained head.

Shapes: B batch, X sets, K KV entries of a set, S KV entries of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.cache.entry_sets import ReadBudget
from longtrain.decoding.retrieval.selector import Selector
from longtrain.targets.model import Target


class OverlapSelector(Selector):
    """Selects a given share of the last set's entries again, and others at random.

    Args:
        budget: see `Selector`.
        target: the target; its layers share one set for each KV head.
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
        assert self.cache is not None and self.cache.entry_sets is not None
        sets = self.cache.entry_sets
        return overlapping(sets.idx_BXK, sets.n_B, self.cache.used, self.overlap)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors, since the sets are the only state."""
        return ()


def overlapping(idx_BXK: Tensor, n_B: Tensor, rows: int, overlap: float) -> Tensor:
    """Return scores that select a share of the given sets again, and other entries at random."""
    B, X, K = idx_BXK.shape
    scores_BXS = torch.rand(B, X, rows + 1, device=idx_BXK.device)
    again_BXK = torch.where(torch.rand(B, X, K, device=idx_BXK.device) < overlap, 2.0, -1.0)
    counts_BXK = (torch.arange(K, device=idx_BXK.device) < n_B[:, None, None]).expand(B, X, K)
    return scores_BXS.scatter_(2, torch.where(counts_BXK, idx_BXK, rows), again_BXK)[..., :rows]
