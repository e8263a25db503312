"""Validation metrics: how well the predicted importance, and SnapKV's, rank a prompt's tokens.

Shapes: T tokens of a packed sequence, H query heads, G KV heads, S ranked tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.ranking import RECALLS, kendall_tau, recall_at
from longtrain.decoding.select import reduce_heads

if TYPE_CHECKING:
    from longtrain.methods.samples import Sample

WINDOW = 32
"""Number of SnapKV's observing tokens. It always keeps them, so they are excluded from the comparison."""


class Ranking:
    """Recall of the true best tokens and Kendall's tau, neither side pooled, over layers and KV heads.

    Recall at k is computed only for prompts with more than k ranked tokens.

    Args:
        found: the samples of the packed sequence.
        n_kv_heads: G; scores are means over the query heads of a KV head, as in the selection.

    Source: LookaheadKV, Table 8 (recall@512, Kendall's tau).
    """

    def __init__(self, found: Sequence[Sample], n_kv_heads: int) -> None:
        self._parts = [(s.start, s.prompt - WINDOW) for s in found if s.length > WINDOW + 1]
        self._heads = n_kv_heads
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, pred_HT: Tensor, true_HT: Tensor, snapkv: Sequence[Tensor]) -> None:
        """Compare one layer.

        Args:
            pred_HT: predicted importance.
            true_HT: true importance.
            snapkv: s_HT of the prompts' last tokens, or nothing if no prompt is long enough.
        """
        sides = {"": pred_HT} | ({"snapkv/": snapkv[0]} if snapkv else {})
        true_GT = reduce_heads(true_HT[None], self._heads)[0]
        for prefix, s_HT in sides.items():
            s_GT = reduce_heads(s_HT[None], self._heads)[0]
            for start, stop in self._parts:
                pred_GS, true_GS = s_GT[:, start:stop], true_GT[:, start:stop]
                for k in RECALLS:
                    if stop - start > k:
                        self._take(f"{prefix}recall@{k}", recall_at(pred_GS, true_GS, k))
                self._take(f"{prefix}kendall_tau", kendall_tau(pred_GS, true_GS))

    def metrics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return name -> (sum, count) over layers, KV heads and prompts, without undefined values."""
        return dict(self._sums)

    def _take(self, name: str, value_G: Tensor) -> None:
        real_G = ~value_G.isnan()
        total, count = value_G.double().where(real_G, 0.0).sum(), real_G.sum()
        if name in self._sums:
            before, counted = self._sums[name]
            total, count = total + before, count + counted
        self._sums[name] = (total, count)


def ranks(true_HT: Tensor, prompt_T: Tensor, prompts: int) -> Tensor:
    """Return the rank of each token in its prompt, 0 for the highest score; ties in order of position.

    Args:
        true_HT: scores.
        prompt_T: the prompt of each token, `prompts` for those of none (whose ranks are meaningless).
        prompts: number of prompts.
    """
    by_score_HT = true_HT.sort(dim=-1, descending=True, stable=True).indices
    # a stable sort by prompt after one by score groups the prompts, best token first
    by_prompt_HT = prompt_T[by_score_HT].sort(dim=-1, stable=True).indices
    order_HT = by_score_HT.gather(1, by_prompt_HT)
    size_P = torch.zeros(prompts + 1, dtype=torch.int64, device=prompt_T.device)
    size_P.index_add_(0, prompt_T, torch.ones_like(prompt_T))
    first_P = size_P.cumsum(0) - size_P
    place_T = torch.arange(len(prompt_T), device=prompt_T.device)
    return torch.empty_like(order_HT).scatter_(1, order_HT, place_T - first_P[prompt_T[order_HT]])
