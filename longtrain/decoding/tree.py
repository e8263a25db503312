"""Drafted trees as tensors: who sees whom, where each node stands, and what an accepted path emits.

Everything here is a fixed number of tensor operations for a given shape: no value is read back to the host.

Shapes: B batch, N tree nodes, P path, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.decoding.roles import Law, TokenTree, TreeShape, Verdict
from longtrain.kernels import greedy


def depths(shape: TreeShape, device: torch.device | str | None = None) -> Tensor:
    """Depth of each node of a shape in level order, root first; int64_N."""
    levels = [0] + [d + 1 for d, width in enumerate(shape.widths) for _ in range(width)]
    return torch.tensor(levels, dtype=torch.int64, device=device)


def chain(tokens_BN: Tensor, *, law: Law = Law.POINT, q_BNV: Tensor | None = None) -> TokenTree:
    """A tree in which every node has one child: `tokens_BN[:, 0]` is the root."""
    n = tokens_BN.shape[1]
    depth_N = torch.arange(n, device=tokens_BN.device)
    return TokenTree(tokens_BN, (depth_N - 1).expand(tokens_BN.shape[0], n), depth_N, law, q_BNV)


def visible(parents_BN: Tensor) -> Tensor:
    """Which nodes each node sees: its ancestors and itself.

    Args:
        parents_BN: parent node, smaller than the child's own index; -1 for the root. int64.

    Returns:
        bool_BNN; entry (b, i, j) is True where j is i or an ancestor of i.
    """
    return greedy.ancestors(parents_BN)


def positions(tree: TokenTree, root_pos_B: Tensor) -> Tensor:
    """Absolute rotary position of each node: the root's plus the depth; int64_BN."""
    return root_pos_B[:, None] + tree.depth_N


def emitted(tree: TokenTree, verdict: Verdict) -> Tensor:
    """The tokens a cycle adds to the text: the accepted nodes below the root, then the target's own token.

    Returns:
        int64_BP; the first `verdict.n_B` of each row count, the others repeat the target's token.
    """
    news_BX = verdict.path_BP.new_empty(len(verdict.path_BP), 1 + verdict.path_BP.shape[1])
    greedy.emitted(tree.tokens_BN, verdict.path_BP, verdict.n_B, verdict.next_B, news_BX)
    return news_BX[:, 1:]
