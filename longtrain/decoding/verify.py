"""Which drafted tokens the target accepts, so that what is emitted follows the target's own law exactly.

The rule follows from how the draft chose its tokens (`TokenTree.law`) and from nothing else: applied to
children chosen in another way it would change the law of the text. No value is read back to the host.

Shapes: B batch, N tree nodes, P path, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.decoding.roles import Law, TokenTree, Verdict
from longtrain.decoding.sampling import Coins, Sampling, probs
from longtrain.errors import ConfigError
from longtrain.kernels.greedy import argmax_rows, follow

EMPTY = 1e-12
"""A residual law with no more mass than this is rounding: the target's law is used instead."""


def verify(
    tree: TokenTree,
    logits_BNV: Tensor,
    sampling: Sampling,
    coins: Coins,
    pos_B: Tensor,
    *,
    depth: int | None = None,
    most_B: Tensor | None = None,
) -> Verdict:
    """Accept a path of each tree and choose the token that follows it.

    Args:
        tree: what was drafted.
        logits_BNV: the target's logits at every node; the rules run in fp32, or in fp64 if these are.
        sampling: the processors, the same the draft's `q_BNV` went through.
        coins: the source of randomness, keyed by the position of the token that is decided.
        pos_B: absolute position of the roots.
        depth: levels of the trees below the root; None reads it from `tree.depth_N` (a host sync on a GPU).
        most_B: most nodes of each path, root included, 1 or more (`KVCache.commit_limit`). A longer path is
            cut there and its next node's token, which the target has accepted, follows it: the law of the
            text stays as it is.

    Raises:
        ConfigError: a sampled tree came without the law its children were drawn from.

    Source: point masses: walking with samples of the target emits them by construction. Independent samples:
        Leviathan et al. 2023, Algorithm 1, and its recursion over siblings (SpecInfer, Algorithm 2). Without
        replacement: recursive rejection sampling (Jeon et al. 2024).
    """
    levels = int(tree.depth_N.max()) if depth is None else depth
    if tree.law is Law.POINT and sampling.greedy:
        best_BN = argmax_rows(logits_BNV)
        return Verdict(*follow(best_BN, tree.tokens_BN, tree.parents_BN, levels, most_B))
    if tree.law is Law.POINT:
        verdict = _walk(tree, logits_BNV, sampling, coins, pos_B, levels)
    elif tree.q_BNV is None:
        raise ConfigError(f"a tree of law '{tree.law.value}' came without q_BNV; the draft must give it")
    else:
        verdict = _reject(tree, tree.q_BNV, logits_BNV, sampling, coins, pos_B, levels)
    return verdict if most_B is None else _cut(tree, verdict, most_B)


def _cut(tree: TokenTree, verdict: Verdict, most_B: Tensor) -> Verdict:
    """The first `most_B` nodes of each path, and the token after them."""
    P = verdict.path_BP.shape[1]
    after_B1 = verdict.path_BP.gather(1, most_B.clamp(max=P - 1)[:, None])
    token_B = tree.tokens_BN.gather(1, after_B1)[:, 0]
    next_B = torch.where(verdict.n_B > most_B, token_B, verdict.next_B)
    return Verdict(verdict.path_BP, verdict.n_B.minimum(most_B), next_B)


def _walk(
    tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, coins: Coins, pos_B: Tensor, levels: int
) -> Verdict:
    """Draw the target's token at a node and follow the first child that carries it, until none does."""

    def choose(node_B: Tensor, n_B: Tensor) -> Tensor:
        return coins.draw(probs(logits_BNV[row_B, node_B], sampling), pos_B + n_B, "target")

    row_B, node_B, n_B = _start(tree)
    walking_B = n_B > 0
    path = [node_B]
    next_B = choose(node_B, n_B)
    for _ in range(levels):
        match_BN = (tree.parents_BN == node_B[:, None]) & (tree.tokens_BN == next_B[:, None])
        walking_B = walking_B & match_BN.any(1)
        node_B = torch.where(walking_B, match_BN.int().argmax(1), node_B)
        n_B = n_B + walking_B
        path.append(node_B * walking_B)
        next_B = torch.where(walking_B, choose(node_B, n_B), next_B)
    return Verdict(torch.stack(path, 1), n_B, next_B)


def _reject(
    tree: TokenTree,
    q_BNV: Tensor,
    logits_BNV: Tensor,
    sampling: Sampling,
    coins: Coins,
    pos_B: Tensor,
    levels: int,
) -> Verdict:
    """Try a node's children in drafted order: accept with probability p/q, else go on with the residual of p.

    One pass over the nodes suffices, since a child's index is above its parent's. A child with q = 0 cannot
    have been drawn: it is padding (fewer tokens in q than children wanted) and is passed over.
    """
    p_BNV = probs(logits_BNV, sampling)
    q_BNV = q_BNV.to(p_BNV.dtype)
    _, node_B, n_B = _start(tree)
    slot_P = torch.arange(levels + 1, device=n_B.device)
    path_BP = torch.zeros_like(n_B)[:, None].repeat(1, levels + 1)
    p_BV, q_BV = p_BNV[:, 0], q_BNV[:, 0]
    for child in range(1, tree.tokens_BN.shape[1]):
        token_B1 = tree.tokens_BN[:, child, None]
        p_B, q_B = p_BV.gather(1, token_B1)[:, 0], q_BV.gather(1, token_B1)[:, 0]
        offered_B = (tree.parents_BN[:, child] == node_B) & (q_B > 0)
        ratio_B = torch.where(offered_B, p_B / q_B, 0.0)
        accepted_B = coins.below(ratio_B, pos_B + n_B, f"accept{child}") & offered_B
        path_BP = torch.where(accepted_B[:, None] & (slot_P == n_B[:, None]), child, path_BP)
        node_B, n_B = torch.where(accepted_B, child, node_B), n_B + accepted_B

        accepted_B1, refused_B1 = accepted_B[:, None], (offered_B & ~accepted_B)[:, None]
        p_BV = torch.where(refused_B1, _normalised((p_BV - q_BV).clamp(min=0), EMPTY, p_BV), p_BV)
        p_BV = torch.where(accepted_B1, p_BNV[:, child], p_BV)
        if tree.law is Law.NO_REPLACE:
            left_BV = q_BV.scatter(1, token_B1, 0.0)
            q_BV = torch.where(refused_B1, _normalised(left_BV, 0.0, left_BV), q_BV)
        q_BV = torch.where(accepted_B1, q_BNV[:, child], q_BV)
    return Verdict(path_BP, n_B, coins.draw(p_BV, pos_B + n_B, "target"))


def _start(tree: TokenTree) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers, the root as current node, and one accepted node a row."""
    row_B = torch.arange(tree.tokens_BN.shape[0], device=tree.tokens_BN.device)
    return row_B, torch.zeros_like(row_B), torch.ones_like(row_B)


def _normalised(weight_BV: Tensor, least: float, other_BV: Tensor) -> Tensor:
    """Rows scaled to sum 1, or `other_BV` where the sum is not above `least`."""
    sum_B1 = weight_BV.sum(-1, keepdim=True)
    return torch.where(sum_B1 > least, weight_BV / sum_B1, other_BV)
