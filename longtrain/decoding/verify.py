"""Acceptance of drafted tokens by the target, such that the text has exactly the target's own distribution.

The rule depends only on how the draft chose its tokens (`TokenTree.children`). Applied to children chosen in
another way it would change the distribution of the text. No value is read back to the host.

Shapes: B batch, N tree nodes, P path, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.decoding.roles import ChildChoice, TokenTree, Verdict
from longtrain.decoding.sampling import Rng, Sampling, probs
from longtrain.errors import ConfigError
from longtrain.kernels.greedy import argmax_rows, follow

EMPTY = 1e-12
"""A residual distribution with no more mass than this is rounding error; the target's is used instead."""


def verify(
    tree: TokenTree,
    logits_BNV: Tensor,
    sampling: Sampling,
    rng: Rng,
    pos_B: Tensor,
    *,
    depth: int | None = None,
    most_B: Tensor | None = None,
) -> Verdict:
    """Accept a path of each tree and choose the token that follows it.

    Args:
        tree: the drafted trees.
        logits_BNV: the target's logits at every node; the rules run in fp32, or in fp64 if these are.
        sampling: the logits processors; the draft's `q_BNV` used the same.
        rng: source of randomness, keyed by the position of the token to decide.
        pos_B: absolute position of the roots.
        depth: levels of the trees below the root; None reads it from `tree.depth_N` (a host sync on a GPU).
        most_B: most nodes of each path, root included, 1 or more (`KVCache.commit_limit`). A longer path is
            cut there, and the token of its next node, which the target has accepted, follows it: so the
            distribution of the text stays the same.

    Raises:
        ConfigError: a sampled tree has no distribution that its children were drawn from.

    Source: POINT: a drafted token is accepted if a sample of the target equals it, so the text consists of
        target samples by construction. IID: Leviathan et al. 2023, Algorithm 1, and its recursion over
        siblings (SpecInfer, Algorithm 2). NO_REPLACE: recursive rejection sampling (Jeon et al. 2024).
        Copied nodes beside sampled ones: the same recursion, with a distribution that has one token.
    """
    levels = int(tree.depth_N.max()) if depth is None else depth
    if tree.children is ChildChoice.POINT and sampling.greedy:
        best_BN = argmax_rows(logits_BNV)
        return Verdict(*follow(best_BN, tree.tokens_BN, tree.parents_BN, levels, most_B))
    if tree.children is ChildChoice.POINT:
        verdict = _walk(tree, logits_BNV, sampling, rng, pos_B, levels)
    elif tree.q_BNV is None and tree.first_copied > 1:
        raise ConfigError(
            f"a tree whose children are '{tree.children.value}' came without q_BNV; the draft must give it"
        )
    else:
        verdict = _reject(tree, logits_BNV, sampling, rng, pos_B, levels)
    return verdict if most_B is None else _cut(tree, verdict, most_B)


def _cut(tree: TokenTree, verdict: Verdict, most_B: Tensor) -> Verdict:
    """Cut each path to its first `most_B` nodes; the token of the next node becomes the next root."""
    P = verdict.path_BP.shape[1]
    after_B1 = verdict.path_BP.gather(1, most_B.clamp(max=P - 1)[:, None])
    token_B = tree.tokens_BN.gather(1, after_B1)[:, 0]
    next_B = torch.where(verdict.n_B > most_B, token_B, verdict.next_B)
    return Verdict(verdict.path_BP, verdict.n_B.minimum(most_B), next_B)


def _walk(
    tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, rng: Rng, pos_B: Tensor, levels: int
) -> Verdict:
    """Draw the target's token at each node and follow the child with that token, until none has it."""

    def choose(node_B: Tensor, n_B: Tensor) -> Tensor:
        # of a tree of one node nothing is copied: the logits of a large batch are larger than its weights
        logits_BV = logits_BNV[:, 0] if logits_BNV.shape[1] == 1 else logits_BNV[row_B, node_B]
        return rng.draw(probs(logits_BV, sampling), pos_B + n_B, "target")

    row_B, node_B, n_B = _start(tree)
    walking_B = n_B > 0
    path = [node_B]
    next_B = choose(node_B, n_B)
    for _ in range(levels):
        # children of the current node whose token is the one that the target drew
        match_BN = (tree.parents_BN == node_B[:, None]) & (tree.tokens_BN == next_B[:, None])
        walking_B = walking_B & match_BN.any(1)
        node_B = torch.where(walking_B, match_BN.int().argmax(1), node_B)
        n_B = n_B + walking_B
        path.append(node_B * walking_B)
        next_B = torch.where(walking_B, choose(node_B, n_B), next_B)
    return Verdict(torch.stack(path, 1), n_B, next_B)


def _reject(
    tree: TokenTree,
    logits_BNV: Tensor,
    sampling: Sampling,
    rng: Rng,
    pos_B: Tensor,
    levels: int,
) -> Verdict:
    """Rejection sampling over a node's children in drafted order: accept with probability min(1, p/q).

    After a rejection p becomes the normalised residual max(p - q, 0), against which the next sibling is
    tested; if all are rejected, the next token is drawn from it. One pass over the nodes suffices, since a
    child's index is above its parent's. A child with q = 0 cannot have been drawn: it is padding (q has fewer
    tokens than the level has children) and is skipped.

    Copied nodes are the last, and have q = 1 for their own token: accepted with probability p, which after a
    rejection loses that token. Whether a copied child is there may depend on the tokens of its drawn siblings
    in one way: it may be missing where one of them has its token. That changes nothing, because p no longer
    has a token that was drawn and rejected.
    """
    p_BNV = probs(logits_BNV, sampling)  # [B, N, V]: the target's distribution after each node
    q_BNV = p_BNV if tree.q_BNV is None else tree.q_BNV.to(p_BNV.dtype)
    _, node_B, n_B = _start(tree)
    slot_P = torch.arange(levels + 1, device=n_B.device)
    path_BP = torch.zeros_like(n_B)[:, None].repeat(1, levels + 1)
    p_BV, q_BV = p_BNV[:, 0], q_BNV[:, 0]  # [B, V]: of the current node, after the children tried so far
    for child in range(1, tree.first_copied):
        token_B1 = tree.tokens_BN[:, child, None]
        p_B, q_B = p_BV.gather(1, token_B1)[:, 0], q_BV.gather(1, token_B1)[:, 0]
        offered_B = (tree.parents_BN[:, child] == node_B) & (q_B > 0)
        ratio_B = torch.where(offered_B, p_B / q_B, 0.0)  # `below` clamps it to 1
        accepted_B = rng.below(ratio_B, pos_B + n_B, f"accept{child}") & offered_B
        path_BP = torch.where(accepted_B[:, None] & (slot_P == n_B[:, None]), child, path_BP)
        node_B, n_B = torch.where(accepted_B, child, node_B), n_B + accepted_B

        # rejected: p becomes the normalised residual max(p - q, 0); accepted: the child is the current node
        accepted_B1, refused_B1 = accepted_B[:, None], (offered_B & ~accepted_B)[:, None]
        p_BV = torch.where(refused_B1, _normalised((p_BV - q_BV).clamp(min=0), EMPTY, p_BV), p_BV)
        p_BV = torch.where(accepted_B1, p_BNV[:, child], p_BV)
        if tree.children is ChildChoice.NO_REPLACE:  # the next sibling was drawn from q without this token
            left_BV = q_BV.scatter(1, token_B1, 0.0)
            q_BV = torch.where(refused_B1, _normalised(left_BV, 0.0, left_BV), q_BV)
        q_BV = torch.where(accepted_B1, q_BNV[:, child], q_BV)
    for child in range(tree.first_copied, tree.tokens_BN.shape[1]):
        token_B1 = tree.tokens_BN[:, child, None]
        offered_B = tree.parents_BN[:, child] == node_B
        ratio_B = torch.where(offered_B, p_BV.gather(1, token_B1)[:, 0], 0.0)
        accepted_B = rng.below(ratio_B, pos_B + n_B, f"accept{child}") & offered_B
        path_BP = torch.where(accepted_B[:, None] & (slot_P == n_B[:, None]), child, path_BP)
        node_B, n_B = torch.where(accepted_B, child, node_B), n_B + accepted_B

        refused_B1 = (offered_B & ~accepted_B)[:, None]
        left_BV = p_BV.scatter(1, token_B1, 0.0)
        p_BV = torch.where(refused_B1, _normalised(left_BV, EMPTY, p_BV), p_BV)
        p_BV = torch.where(accepted_B[:, None], p_BNV[:, child], p_BV)
    return Verdict(path_BP, n_B, rng.draw(p_BV, pos_B + n_B, "target"))


def _start(tree: TokenTree) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the batch, the root as current node, and one accepted node for each sequence."""
    row_B = torch.arange(tree.tokens_BN.shape[0], device=tree.tokens_BN.device)
    return row_B, torch.zeros_like(row_B), torch.ones_like(row_B)


def _normalised(weight_BV: Tensor, least: float, other_BV: Tensor) -> Tensor:
    """Weights scaled to sum 1, or `other_BV` where the sum is not above `least`."""
    sum_B1 = weight_BV.sum(-1, keepdim=True)
    return torch.where(sum_B1 > least, weight_BV / sum_B1, other_BV)
