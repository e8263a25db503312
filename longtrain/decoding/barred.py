"""Ids that may not come yet: those that end a text, among its first tokens.

Shapes: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from longtrain.decoding.roles import TokenTree
from longtrain.errors import ConfigError


class Barred:
    """Keeps the ids that end a text out of its first tokens.

    Args:
        ids: that may not come.
        tokens: first tokens of a text that they may not be among.
        device: of the logits.

    Raises:
        ConfigError: `tokens` is negative.

    Source: transformers, `MinNewTokensLengthLogitsProcessor`.
    """

    def __init__(self, ids: Collection[int], tokens: int, device: torch.device) -> None:
        if tokens < 0:
            raise ConfigError(f"min_new_tokens={tokens}; allowed: 0 or more")
        self.tokens = tokens if ids else 0
        self.ids = torch.tensor(sorted(ids), dtype=torch.int64, device=device)

    def out_of(self, logits_BV: Tensor) -> Tensor:
        """Logits of each text's first token."""
        return logits_BV.index_fill(-1, self.ids, float("-inf")) if self.tokens else logits_BV

    def out_of_nodes(self, logits_BNV: Tensor, tree: TokenTree, said_B: Tensor) -> Tensor:
        """Logits below each node of a tree whose root is the last of `said_B` tokens."""
        if not self.tokens:
            return logits_BNV
        early_BN = said_B[:, None] + tree.depth_N < self.tokens
        return torch.where(early_BN[..., None], self.out_of(logits_BNV), logits_BNV)
