"""The indexer at inference: stores an index key of every committed token, and scores within each layer.

Shapes: L layers, B batch, T tokens of a step, S cache positions, P tokens of a path, H query heads, G KV
heads, D head dim, I index dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.retrieval.own_keys import KeyedSelector
from longtrain.kernels.entry_scores import entry_scores

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.cache.entry_sets import ReadBudget
    from longtrain.decoding.roles import TokenTree, Verdict
    from longtrain.methods.indexer.modules import Indexer
    from longtrain.targets.step import TargetStep


class IndexerSelector(KeyedSelector):
    """Scores a layer's KV entries with an indexer (`decoding.retrieval.selector.Selector`).

    Args:
        module: the indexer, in the target's dtype and on its device.
        budget: see `Selector`.
    """

    name, title = "indexer", "an indexer"

    def __init__(self, module: Indexer, budget: ReadBudget) -> None:
        super().__init__(module.k_proj, budget)
        self.module = module

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Compute index keys of the prompts."""
        super().start(tokens_BS, n_B, step, cache)
        (B, S), (L, G, _, dims) = tokens_BS.shape, self.module.k_proj.shape
        assert self.cache is not None
        self.reserve(L, B, S + self.cache.room_left(), G, dims)
        self._index(torch.arange(S, device=tokens_BS.device).expand(B, -1))

    def at_layer(self, layer: int, q_BHTD: Tensor, k_BGSD: Tensor, len_B: Tensor) -> Tensor:
        """Return log-weights of the root's index query (`Selector`); -inf in sequences that are not due."""
        k_LBSGI, cache = self.begun()
        if self.budget.every > 1 and cache.entry_sets is not None:
            len_B = len_B * cache.entry_sets.due_B  # 0: no keys of the others are read
        (G, S), one = k_BGSD.shape[1:3], slice(layer, layer + 1)
        q_BGHI = self.module.query(q_BHTD[:, :, 0].transpose(0, 1)[None], one).unflatten(1, (G, -1))
        return entry_scores(q_BGHI, k_LBSGI[layer, :, :S], len_B, groups=G, scale=q_BGHI.shape[-1] ** -0.5)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Compute index keys of the accepted nodes; values beyond the length are overwritten later."""
        _, cache = self.begun()
        first_B = cache.len_B - verdict.n_B
        path_P = torch.arange(verdict.path_BP.shape[1], device=first_B.device)
        self._index(first_B[:, None] + path_P)

    @torch.no_grad()
    def _index(self, slot_BP: Tensor) -> None:
        """Compute the index keys at these cache positions in every layer."""
        k_LBSGI, cache = self.begun()
        row_B1 = torch.arange(len(slot_BP), device=slot_BP.device)[:, None]
        for layer, k_BSGI in enumerate(k_LBSGI):
            k_BPGD = cache.keys(layer)[row_B1, :, slot_BP]
            found = self.module.key(k_BPGD.flatten(0, 1).transpose(0, 1)[None], slice(layer, layer + 1))
            k_BSGI[row_B1, slot_BP] = found.unflatten(0, slot_BP.shape)
