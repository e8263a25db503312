"""Chooses the prompt's KV entries that a draft keeps for good, layer by layer during the prefill.

Shapes: B batch, S prompt tokens, F entries that stay, G KV heads, H query heads, D head dim, N observing
queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from longtrain.decoding.observe import LastQueries
from longtrain.decoding.select import max_pool, reduce_heads, top
from longtrain.kernels.importance import importance, suffix_lse

if TYPE_CHECKING:
    from longtrain.methods.magicdec.config import Config
    from longtrain.methods.magicdec.sparse_cache import Layout
    from longtrain.targets.model import Target


class Choice(Protocol):
    """Chooses the KV entries of each sequence and KV head that stay."""

    def __call__(self, layer: int, q_BHSD: Tensor, k_BGSD: Tensor) -> Tensor:
        """Return positions fixed_BGF; those beyond a sequence's count are ignored."""


class SinkEntries:
    """Chooses the first tokens: attention sinks.

    Args:
        layout: the layout of the prompts.

    Source: StreamingLLM (arXiv 2309.17453) §3.2; the newest tokens are part of every choice.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, layer: int, q_BHSD: Tensor, k_BGSD: Tensor) -> Tensor:
        """Return the first positions for every head (see `Choice`)."""
        B, G, S, _ = k_BGSD.shape
        at_F = torch.arange(max(self.layout.fixed), device=k_BGSD.device).clamp(max=S - 1)
        return at_F.expand(B, G, -1)


class ScoredEntries:
    """Chooses the entries that the prompt's last tokens attend to most, max-pooled, for each KV head.

    Args:
        layout: the layout of the prompts.
        config: window and kernel.
        target: the target, for the scale and the sinks of its attention.

    Source: SnapKV (arXiv 2404.14469), Algorithm 1, as in `evict=snapkv`.
    """

    def __init__(self, layout: Layout, config: Config, target: Target) -> None:
        self.layout, self.config, self.target = layout, config, target

    def __call__(self, layer: int, q_BHSD: Tensor, k_BGSD: Tensor) -> Tensor:
        """Return the highest-scored positions of each head (see `Choice`)."""
        layout = self.layout
        s_BGS = self._scores(layer, q_BHSD, k_BGSD)
        pooled = max_pool(s_BGS[None], layout.lengths, kernel=self.config.kernel)
        return top(pooled, layout.choices, [layout.fixed]).idx_LBGK[0]

    def _scores(self, layer: int, q_BHSD: Tensor, k_BGSD: Tensor) -> Tensor:
        """Return attention averaged over the last tokens and the heads of a KV head; 0 among those tokens."""
        last = LastQueries(self.layout.lengths, self.config.window)
        last(layer, q_BHSD, k_BGSD, k_BGSD)
        spans = last.spans()
        B, G, S, _ = k_BGSD.shape
        if not spans:
            return torch.zeros(B, G, S, device=k_BGSD.device)
        q_NHD, own_k_NGD = last.layer(layer)
        k_BSGD, scale = k_BGSD.transpose(1, 2), self.target.scaling(layer)
        sinks_H = self.target.sinks(layer)
        lse_NH = suffix_lse(q_NHD, own_k_NGD, k_BSGD, spans, scale=scale, sinks_H=sinks_H)
        return reduce_heads(importance(q_NHD, lse_NH, k_BSGD, spans, scale=scale), G)
