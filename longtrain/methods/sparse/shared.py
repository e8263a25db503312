"""An oracle for sets shared by layers: a dense forward of the root finds what all of them attend to.

Shapes: L layers, B batch, S cache positions, X sets, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.entry_sets import ReadBudget
from longtrain.decoding.retrieval.selector import Selector
from longtrain.errors import ConfigError
from longtrain.methods.sparse.rules import attention
from longtrain.targets.step import OutputRequest, TokenBatch

if TYPE_CHECKING:
    from longtrain.methods.sparse.config import Config
    from longtrain.targets.model import Target


class SharedOracle(Selector):
    """The entries that the root attends to most in all layers of a group together, by a forward of its own.

    It bounds every retrieval head whose sets those layers share, and costs a dense step for each choice.

    Args:
        budget: see `Selector`.
        config: `groups` of neighbouring layers; `all_heads`: one set for all KV heads.
        target: the target whose attention is measured.

    Raises:
        ConfigError: more groups than layers.
    """

    def __init__(self, budget: ReadBudget, config: Config, target: Target) -> None:
        super().__init__(budget)
        self.name, self.target = f"sparse {config.rule}", target
        L, G = target.info.n_layers, target.info.n_kv_heads
        if config.groups > L:
            raise ConfigError(f"method.groups={config.groups}; allowed: 1 to {L}, the target's layers")
        group_L1 = torch.arange(L)[:, None] * config.groups // L
        self.table_LG = group_L1.expand(L, G).clone() if config.all_heads else group_L1 * G + torch.arange(G)

    def ahead(self, root_B: Tensor) -> Tensor:
        """Return the attention of the root, summed over the layers and query heads that read a set."""
        cache, table_LG = self.cache, self.table_LG
        assert cache is not None and table_LG is not None
        wide = torch.promote_types(self.target.dtype, torch.float32)
        sets = 1 + int(table_LG.max())
        scores_BXS = torch.zeros(len(root_B), sets, cache.used, dtype=wide, device=root_B.device)

        def look(layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
            keys_BGSD = cache.keys(layer)[:, :, : scores_BXS.shape[-1]]
            found_BGS = attention(self.target, layer, q_BHTD[:, :, 0], keys_BGSD, cache.len_B)
            scores_BXS.index_add_(1, table_LG[layer].to(root_B.device), found_BGS)

        rows = TokenBatch(cache.len_B[:, None], root_B[:, None])
        with cache.dense():
            self.target.forward(rows, cache, outputs=OutputRequest("none"), hook=look)
        return scores_BXS
