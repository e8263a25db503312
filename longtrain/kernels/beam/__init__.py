"""The best continuations of all nodes of a tree level together, by cumulative log-probability.

Triton if `kernels.devices` supports it, else plain torch (in this file). Among equal ones the kernels take
the lowest token of the first node; torch does not define an order.

No continuation has a higher score than its node, neither by rounding nor where logits are not finite. A
selection of the best nodes of a tree depends on it: it would take a child without its parent, and the child
would be verified below another node (`decoding.tree.BestNodes`).

Shapes: B batch, M nodes of a level, V vocabulary, K continuations requested.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.beam.tree import ExpandingTree
from longtrain.kernels.devices import kernels_serve

__all__ = ["ExpandingTree", "best_continuations"]

_MOST = 64
"""Most continuations of the kernels, which look for one after the other."""


def best_continuations(
    logits_BMV: Tensor,
    score_BM: Tensor,
    width: int,
    temperature: float,
    *,
    ids_V: Tensor | None = None,
    tree: ExpandingTree | None = None,
    above: int = 0,
    nodes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` most likely continuations of all nodes together, best first.

    Args:
        logits_BMV: the logits of each node.
        score_BM: log-probability of each node.
        width: K, at most M V (and M times K of one node's).
        temperature: the number that logits are divided by.
        ids_V: token id in the result for each index of V, int64; None: the index itself.
        tree: the best continuations become its next level.
        above: index in `tree` of the first of the M nodes, which are its last level so far.
        nodes: number of continuations added to `tree`; None: all.

    Returns:
        tokens_BK, parents_BK (nodes of the level), both int64, and score_BK, at most the parent's score.
    """
    M, V = logits_BMV.shape[1:]
    few = min(width, V)
    if kernels_serve(logits_BMV) and width <= _MOST and M * few <= 2**14:
        from longtrain.kernels.beam import kernel

        return kernel.best_continuations(
            logits_BMV, score_BM, width, temperature, ids_V, tree, above, width if nodes is None else nodes
        )
    wide = torch.promote_types(logits_BMV.dtype, torch.float32)
    logp_BMV = (logits_BMV.to(wide) / temperature).log_softmax(-1)
    # only a node's own best `width` can be among the best of all
    few_BMK, token_BMK = logp_BMV.topk(few, dim=-1)
    own_BM1 = score_BM[..., None].to(wide)
    total_BX = (own_BM1 + few_BMK).fmin(own_BM1).flatten(1)  # `fmin` passes over NaN
    best_BK, at_BK = total_BX.topk(width, dim=-1)
    token_BK, parent_BK = token_BMK.flatten(1).gather(1, at_BK), at_BK // few
    token_BK = token_BK if ids_V is None else ids_V[token_BK]
    if tree is not None:
        tree.add(token_BK[:, :nodes], parent_BK[:, :nodes] + above, above + M)
    return token_BK, parent_BK, best_BK
