"""Sets of rows that change from step to step by a given share.

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
