"""Reference implementation of `kernels.node_choice` in plain torch. Shapes: as there; C candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.kernels import greedy

if TYPE_CHECKING:
    from longtrain.kernels.node_choice import Candidates, Rates

_NEVER = float("-inf")


def choose(found: Candidates, rates: Rates, keep: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.node_choice.choose`."""
    (B, N), K, device = found.tokens_BN.shape, found.copy_BK.shape[1], found.copy_BK.device
    step_K = torch.arange(K, device=device)
    sees_BNN = greedy.ancestors(found.parents_BN)
    accepted_BL, seen_BL = rates.copied_2BL
    copied_BK = (accepted_BL / seen_BL).log().gather(1, _lengths(found, rates)).cumsum(1)
    accepted_BQ, seen_BQ = rates.drafted_2BQ
    # a less confident node is never held for more probable; within a class the draft's order counts
    rate_BQ = (accepted_BQ / seen_BQ).cummin(1).values.log()
    drafted_BN = rate_BQ.gather(1, _confidence(found, rates)) + 1e-3 * found.score_BN.float()
    # nor is a node held for more probable than its parent, as rounded scores may say
    drafted_BN = drafted_BN[:, None].where(sees_BNN, float("inf")).amin(2)

    through_BN = runs_through(found.tokens_BN, found.depth_BN, found.copy_BK, sees_BNN)
    by_copy_BN = copied_BK.gather(1, (found.depth_BN - 1).clamp(min=0, max=K - 1)).where(through_BN, _NEVER)
    drafted_BN = drafted_BN.maximum(by_copy_BN)
    shared_B1, below_B1 = deepest(found.depth_BN, through_BN)
    tail_BK = copied_BK.where(step_K >= shared_B1, _NEVER)

    # C = N - 1 + K candidates; in their order a parent is before its children, which breaks ties
    score_BC = torch.cat((drafted_BN[:, 1:], tail_BK), 1)
    order_BC = score_BC.sort(dim=1, descending=True, stable=True).indices
    kept_BM = order_BC[:, :keep].sort(dim=1).values
    above_BK = torch.where(step_K == shared_B1, below_B1, N - 1 + step_K)  # in nodes: 1 + candidate
    above_BC = torch.cat((found.parents_BN[:, 1:], above_BK), 1)
    place_BX = torch.zeros(B, N + K, dtype=torch.int64, device=device)  # of node 1 + c among those kept
    place_BX.scatter_(1, kept_BM + 1, torch.arange(1, keep + 1, device=device).expand(B, -1))
    root_B1 = torch.zeros_like(shared_B1)
    tokens_BC = torch.cat((found.tokens_BN[:, 1:], found.copy_BK), 1)
    depth_BC = torch.cat((found.depth_BN[:, 1:], (step_K + 1).expand(B, -1)), 1)
    return (
        torch.cat((found.tokens_BN[:, :1], tokens_BC.gather(1, kept_BM)), 1),
        torch.cat((root_B1 - 1, place_BX.gather(1, above_BC.gather(1, kept_BM))), 1),
        torch.cat((root_B1, depth_BC.gather(1, kept_BM)), 1),
        (kept_BM >= N - 1).sum(1, keepdim=True),
    )


def learn(
    found: Candidates, rates: Rates, tokens_BX: Tensor, path_BP: Tensor, n_B: Tensor, next_B: Tensor
) -> None:
    """See `kernels.node_choice.learn`."""
    n_B1, K = n_B[:, None], found.copy_BK.shape[1]
    text_BP = tokens_BX.gather(1, path_BP).roll(-1, 1)
    step_P = torch.arange(text_BP.shape[1], device=text_BP.device)
    text_BP = text_BP.where(step_P < n_B1 - 1, next_B[:, None]).where(step_P < n_B1, -1)
    right_BK = (found.copy_BK == text_BP[:, :K]).long().cumprod(1)
    reached_BK = torch.cat((torch.ones_like(right_BK[:, :1]), right_BK[:, :-1]), 1)
    tried_BK = reached_BK * (step_P[:K] < n_B1)
    _count(rates.copied_2BL, _lengths(found, rates), right_BK, tried_BK)
    sees_BNN = greedy.ancestors(found.parents_BN)
    through_BN = runs_through(found.tokens_BN, found.depth_BN, text_BP, sees_BNN)[:, 1:]
    tried_BN = (n_B1 > 0).expand_as(through_BN)
    _count(rates.drafted_2BQ, _confidence(found, rates)[:, 1:], through_BN & tried_BN, tried_BN)


def runs_through(tokens_BN: Tensor, depth_BN: Tensor, text_BK: Tensor, sees_BNN: Tensor) -> Tensor:
    """Return which nodes of a tree a text after the root runs through, the root included; bool_BN.

    Args:
        tokens_BN: token of each node.
        depth_BN: depth of each node.
        text_BK: tokens after the root; it runs through no node deeper than K.
        sees_BNN: mask of each node's ancestors and itself.
    """
    K = text_BK.shape[1]
    same_BN = tokens_BN == text_BK.gather(1, (depth_BN - 1).clamp(min=0, max=K - 1))
    same_BN = (same_BN & (depth_BN <= K)) | (depth_BN == 0)
    return (same_BN[:, None] | ~sees_BNN).all(2)


def deepest(depth_BN: Tensor, through_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return depth and index [B, 1] of the deepest of some nodes of a tree; of several, the first."""
    N = depth_BN.shape[1]
    place_BN = depth_BN * N + (N - 1 - torch.arange(N, device=through_BN.device))
    best_B1 = place_BN.where(through_BN, -1).amax(1, keepdim=True)
    return best_B1 // N, N - 1 - best_B1 % N


def _lengths(found: Candidates, rates: Rates) -> Tensor:
    """Return the class of the match before each copied token, which is one longer behind each of them."""
    step_K = torch.arange(found.copy_BK.shape[1], device=found.copy_BK.device)
    return torch.bucketize(found.matched_B[:, None] + step_K, rates.ends_E)


def _confidence(found: Candidates, rates: Rates) -> Tensor:
    """Return the class of each node's confidence."""
    last = rates.drafted_2BQ.shape[2] - 1
    return (found.score_BN.float() / -rates.step).clamp(min=0, max=last).long()


def _count(table_2BY: Tensor, class_BC: Tensor, accepted_BC: Tensor, tried_BC: Tensor) -> None:
    """Add accepted and tried nodes to their classes, in place.

    They are counted before they are added, so that rounding does not depend on how the counting is divided.
    """
    for table_BY, some_BC in zip(table_2BY, (accepted_BC, tried_BC), strict=True):
        table_BY += torch.zeros_like(table_BY).scatter_add_(1, class_BC, some_BC.to(table_BY.dtype))
