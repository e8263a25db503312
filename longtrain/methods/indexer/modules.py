"""The indexer: projects the target's own queries and keys to a few dimensions.

Shapes: R queries, S keys, L layers, H query heads, G KV heads, D the target's head dim, I index dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtrain.methods.set_objective import SetScorer

if TYPE_CHECKING:
    from longtrain.methods.indexer.config import Config
    from longtrain.targets.info import TargetInfo

EACH = slice(None)
"""Selects all layers."""


class Indexer(SetScorer):
    """Trainable projections, and the table that gives each layer and KV head a set of its own.

    Queries and keys are projected after RoPE, as the cache stores them. A head begins with the same random
    projection for both, whose products equal the target's own in expectation.

    Args:
        config: hyperparameters.
        info: the target's shapes.

    Source: RTPurbo (arXiv 2605.16928), the token indexer; DeepSeek-V3.2's (arXiv 2512.02556) is similar, with
        a few small heads in each layer.
    Note: here all heads have an index, and the query heads of a KV head share its keys' projection. Weights
        are a softmax's, as those of `specontext`, and not sums of ReLUs.
    """

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        info.require_full_layers("an indexer")
        L, H, G, D = info.n_layers, info.n_heads, info.n_kv_heads, info.head_dim
        self.sets, self.heads = L, (H, G)
        self.k_proj = nn.Parameter(torch.randn(L, G, D, config.dims) * (D * config.dims) ** -0.25)
        self.q_proj = nn.Parameter(self.k_proj.detach().repeat_interleave(H // G, 1))
        self.register_buffer("table_LG", torch.arange(L * G).view(L, G))

    def query(self, q_LHRD: Tensor, layers: slice = EACH) -> Tensor:
        """Project the target's queries of these layers to index queries, [R, L * H, I]."""
        return _projected(q_LHRD, self.q_proj[layers])

    def key(self, k_LGSD: Tensor, layers: slice = EACH) -> Tensor:
        """Project the target's keys of these layers to index keys, [S, L * G, I]."""
        return _projected(k_LGSD, self.k_proj[layers])


def _projected(x_LHRD: Tensor, weight_LHDI: Tensor) -> Tensor:
    return (x_LHRD.to(weight_LHDI.dtype) @ weight_LHDI).movedim(2, 0).flatten(1, 2)
