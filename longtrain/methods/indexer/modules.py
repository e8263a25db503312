"""The indexer: projections of the target's own queries and keys to a few dimensions.

Shapes: R, S rows, L layers, H query heads, G KV heads, D the target's head dim, I index dim.
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
"""All layers."""


class Indexer(SetScorer):
    """Trainable projections, and the table in which each layer and KV head has a set of its own.

    What is projected are queries and keys after RoPE, as the cache holds them. A head begins with the same
    random projection for both, whose products are the target's own in expectation.

    Args:
        config: hyperparameters.
        info: the target's shapes.

    Source: RTPurbo (arXiv 2605.16928), the token indexer; DeepSeek-V3.2's (arXiv 2512.02556) asks likewise,
        by a few small heads in each layer.
    Note: all heads have an index here, and the query heads of a KV head share its keys' projection. Weights
        are a softmax's, as those of `specontext`, and not sums of ReLUs.
    """

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        L, H, G, D = info.n_layers, info.n_heads, info.n_kv_heads, info.head_dim
        self.sets, self.heads = L, (H, G)
        self.k_proj = nn.Parameter(torch.randn(L, G, D, config.dims) * (D * config.dims) ** -0.25)
        self.q_proj = nn.Parameter(self.k_proj.detach().repeat_interleave(H // G, 1))
        self.register_buffer("table_LG", torch.arange(L * G).view(L, G))

    def query(self, q_LHRD: Tensor, layers: slice = EACH) -> Tensor:
        """Queries of the index, [R, L * H, I], of the target's in these layers."""
        return _projected(q_LHRD, self.q_proj[layers])

    def key(self, k_LGSD: Tensor, layers: slice = EACH) -> Tensor:
        """Keys of the index, [S, L * G, I], of the target's in these layers."""
        return _projected(k_LGSD, self.k_proj[layers])


def _projected(x_LHRD: Tensor, weight_LHDI: Tensor) -> Tensor:
    return (x_LHRD.to(weight_LHDI.dtype) @ weight_LHDI).movedim(2, 0).flatten(1, 2)
