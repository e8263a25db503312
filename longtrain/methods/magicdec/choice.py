"""Which rows of a prompt a draft keeps for good, told layer by layer while the prompt is read.

Shapes: B batch, S prompt tokens, F rows that stay, G KV heads, H query heads, D head dim, N observing rows.
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
    from longtrain.methods.magicdec.rows import Layout


class Choice(Protocol):
    """Rows of each sequence and KV head that stay."""

    def __call__(self, layer: int, q_BHSD: Tensor, k_BGSD: Tensor) -> Tensor:
        """Positions fixed_BGF; those beyond a sequence's count mean nothing."""


class FirstRows:
    """The first rows: attention sinks.

    Args:
        layout: the layout of the prompts.

    Source: StreamingLLM (arXiv 2309.17453) §3.2; the newest rows are every choice's.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, layer: int, q_BHSD: Tensor, k_BGSD: Tensor) -> Tensor:
        """See `Choice`."""
        B, G, S, _ = k_BGSD.shape
        at_F = torch.arange(max(self.layout.fixed), device=k_BGSD.device).clamp(max=S - 1)
        return at_F.expand(B, G, -1)


class ScoredRows:
    """The rows that the prompt's last ones attend to most, max-pooled, each KV head its own.

    Args:
        layout: the layout of the prompts.
        config: window and kernel.

    Source: SnapKV (arXiv 2404.14469), Algorithm 1, as `evict=snapkv` has it.
    """

    def __init__(self, layout: Layout, config: Config) -> None:
        self.layout, self.config = layout, config

    def __call__(self, layer: int, q_BHSD: Tensor, k_BGSD: Tensor) -> Tensor:
        """See `Choice`."""
        layout = self.layout
        s_BGS = self._scores(layer, q_BHSD, k_BGSD)
        pooled = max_pool(s_BGS[None], layout.lengths, kernel=self.config.kernel)
        return top(pooled, layout.choices, [layout.fixed]).idx_LBGK[0]

    def _scores(self, layer: int, q_BHSD: Tensor, k_BGSD: Tensor) -> Tensor:
        """Mean attention of the last rows and of the heads of a KV head; 0 among those rows."""
        last = LastQueries(self.layout.lengths, self.config.window)
        last(layer, q_BHSD, k_BGSD, k_BGSD)
        spans = last.spans()
        B, G, S, D = k_BGSD.shape
        if not spans:
            return torch.zeros(B, G, S, device=k_BGSD.device)
        q_NHD, own_k_NGD = last.layer(layer)
        k_BSGD = k_BGSD.transpose(1, 2)
        lse_NH = suffix_lse(q_NHD, own_k_NGD, k_BSGD, spans, scale=D**-0.5)
        return reduce_heads(importance(q_NHD, lse_NH, k_BSGD, spans, scale=D**-0.5), G)
