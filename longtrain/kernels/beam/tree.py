"""Trees during drafting: tokens, parents and attention mask of the nodes so far.

Shapes: B batch, N nodes of a tree, K nodes that are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpandingTree:
    """Trees of one shape that are filled level by level; nodes after the last level are undefined.

    Args:
        tokens_BN: token of each node, int64.
        parents_BN: parent of each node, int64; -1 for the root.
        sees_BNN: bool mask of the nodes that each node sees: its ancestors and itself.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    sees_BNN: Tensor

    @classmethod
    def of(cls, root_B: Tensor, nodes: int) -> ExpandingTree:
        """Trees with room for `nodes` nodes, of which only the root is set."""
        tokens_BN, parents_BN = root_B.new_empty((2, len(root_B), nodes)).unbind(0)
        sees_BNN = torch.empty((len(root_B), nodes, nodes), dtype=torch.bool, device=root_B.device)
        tokens_BN[:, 0], parents_BN[:, 0] = root_B, -1
        sees_BNN[:, 0], sees_BNN[:, 0, 0] = False, True
        return cls(tokens_BN, parents_BN, sees_BNN)

    def add(self, tokens_BK: Tensor, parents_BK: Tensor, first: int) -> None:
        """Set nodes `first, first + 1, ...`, whose parents are among the nodes before them."""
        K, N = tokens_BK.shape[1], self.tokens_BN.shape[1]
        child = slice(first, first + K)
        self.tokens_BN[:, child], self.parents_BN[:, child] = tokens_BK, parents_BK
        above_BKN = self.sees_BNN.gather(1, parents_BK[..., None].expand(-1, -1, N))
        self.sees_BNN[:, child] = above_BKN
        self.sees_BNN.diagonal(dim1=1, dim2=2)[:, child] = True
