"""Drafted trees as tensors: attention masks, positions, and the choice of the best nodes.

Everything here is a fixed number of tensor operations for a given shape: no value is read back to the host.

Shapes: B batch, N tree nodes, P path, V vocabulary, C candidates, K verified nodes below the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from longtrain.decoding.roles import ChildChoice, TokenTree, TreeShape
from longtrain.kernels import greedy


def depths(shape: TreeShape, device: torch.device | str | None = None) -> Tensor:
    """Depth of each node of a shape in level order, root first; int64_N."""
    levels = [0] + [d + 1 for d, width in enumerate(shape.widths) for _ in range(width)]
    return torch.tensor(levels, dtype=torch.int64, device=device)


class BestNodes:
    """Selects the most probable continuations of an expanded tree, whatever their depth.

    Args:
        shape: its `keep` is the number of nodes to select.
        device: the device that trees are drafted on.

    Source: EAGLE-2 (arXiv 2406.16858) §4.2, reranking.
    """

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        assert shape.keep is not None
        self._keep, self._widths = shape.keep, shape.widths
        candidate_of, depth_of = [-1], list[int]()  # of each expanded node; of each candidate
        for depth, width in enumerate(shape.widths):
            candidate_of += range(len(depth_of), len(depth_of) + width)
            depth_of += [depth + 1] * self.of_level(depth)
        self._candidate_N = torch.tensor(candidate_of, device=device)
        self._depth_C = torch.tensor(depth_of, device=device)
        self._place_1K = torch.arange(1, self._keep + 1, device=device)[None]

    def of_level(self, depth: int) -> int:
        """Number of candidates below all nodes of a depth."""
        return max(self._keep, self._widths[depth])

    def tree(self, root_B: Tensor, levels: Sequence[tuple[Tensor, Tensor, Tensor]]) -> TokenTree:
        """The best candidates as a tree, in level order.

        A node's score is never above its parent's, also where they are rounded (`kernels.beam`), and ties go
        to the earlier candidate: so the parents of all selected candidates are selected too.

        Args:
            root_B: the root's token.
            levels: token, parent (an expanded node) and cumulative log-probability of each level's
                candidates, best first; the first of them are the expanded nodes of the next level.
        """
        tokens_BC, parents_BC, score_BC = (torch.cat(part, 1) for part in zip(*levels, strict=True))
        # [B, C] -> [B, K]: the K best of all levels, back in level order
        order_BC = score_BC.sort(dim=1, descending=True, stable=True).indices
        kept_BK = order_BC[:, : self._keep].sort(dim=1).values
        # parents as indices of selected nodes: place_BC is 1 + the index of a selected candidate
        place_BC = torch.zeros_like(parents_BC).scatter_(1, kept_BK, self._place_1K.expand_as(kept_BK))
        above_BK = self._candidate_N[parents_BC.gather(1, kept_BK)]
        parents_BK = place_BC.gather(1, above_BK.clamp(min=0)).where(above_BK >= 0, 0)
        first_B1 = torch.zeros_like(root_B)[:, None]
        return TokenTree(
            torch.cat((root_B[:, None], tokens_BC.gather(1, kept_BK)), 1),
            torch.cat((first_B1 - 1, parents_BK), 1),
            torch.cat((first_B1, self._depth_C[kept_BK]), 1),
            score_BN=torch.cat((first_B1.to(score_BC.dtype), score_BC.gather(1, kept_BK)), 1),
        )


def chain(
    tokens_BN: Tensor,
    *,
    children: ChildChoice = ChildChoice.POINT,
    q_BNV: Tensor | None = None,
    copied: int = 0,
) -> TokenTree:
    """A tree in which every node has one child; `tokens_BN[:, 0]` is the root (see `TokenTree`)."""
    depth_N, parent_N = _of_chain(tokens_BN.shape[1], tokens_BN.device)
    return TokenTree(tokens_BN, parent_N.expand_as(tokens_BN), depth_N, children, q_BNV, copied)


@lru_cache(maxsize=64)
def _of_chain(nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depth and parent of each node of a chain."""
    depth_N = torch.arange(nodes, device=device)
    return depth_N, depth_N - 1


def visible(parents_BN: Tensor) -> Tensor:
    """Attention mask among the nodes of a tree: each node sees its ancestors and itself.

    Args:
        parents_BN: parent node, smaller than the child's own index; -1 for the root. int64.

    Returns:
        bool_BNN; entry (b, i, j) is True where j is i or an ancestor of i.
    """
    return greedy.ancestors(parents_BN)


def positions(tree: TokenTree, root_pos_B: Tensor) -> Tensor:
    """Absolute rotary position of each node: the root's plus the depth; int64_BN."""
    root_B1 = root_pos_B[:, None]
    return root_B1 if tree.tokens_BN.shape[1] == 1 else root_B1 + tree.depth_N
