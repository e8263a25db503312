"""The nodes of a joined tree: the most probable of the draft's and of the copy's, by what this text accepted.

Two tables on the device say how probable a node is. A copied token is accepted as often as the tokens after a
match of its length were: behind each accepted token the match is one longer. A drafted node is accepted as
often as those of its confidence. Both begin with a prior and are updated from the tokens of every cycle.

Everything is a fixed number of tensor operations: no value is read back to the host.

Shapes: B batch, N nodes of the draft, K copied tokens, C candidates, M verified nodes below the root, P path,
L classes of match length, Q classes of confidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longtrain.decoding.roles import TokenTree, Verdict
from longtrain.decoding.tree import visible

LENGTHS = (0, 1, 2, 3, 4, 6, 9, 14, 22)
"""Longest match of each class; the last class has all longer ones."""
PRIOR = (0.02, 0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
"""Acceptance expected of the token after a match, by class, before this text has shown any."""
STEP, CLASSES = 0.5, 16
"""Width of a class of confidence in nats of log-probability, and the number of classes."""
WEIGHT = 4.0
"""Tokens that a prior counts as."""
_NEVER = float("-inf")


@dataclass(frozen=True)
class Candidates:
    """What was proposed in a cycle, for `NodeSplit.learn`.

    Args:
        own: the draft's tree.
        sees_BNN: mask of each node's ancestors and itself.
        confidence_BN: class of each node's confidence.
        copy_BK: the copied tokens.
        length_BK: class of the match before each of them.
    """

    own: TokenTree
    sees_BNN: Tensor
    confidence_BN: Tensor
    copy_BK: Tensor
    length_BK: Tensor


class NodeSplit:
    """Chooses the nodes that are verified; it learns from a text's own accepted tokens.

    Args:
        batch: number of sequences.
        device: device of the tables.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self._ends = torch.tensor(LENGTHS, device=device)
        step_Q = torch.arange(CLASSES, dtype=torch.float32, device=device)
        prior_L = torch.tensor(PRIOR, device=device)
        prior_Q = (-STEP * (step_Q + 0.5)).exp()
        # [2, B, classes]: accepted, and seen
        self._fresh_copied = WEIGHT * torch.stack((prior_L, torch.ones_like(prior_L)))[:, None]
        self._fresh_drafted = WEIGHT * torch.stack((prior_Q, torch.ones_like(prior_Q)))[:, None]
        self.copied_2BL = self._fresh_copied.repeat(1, batch, 1)
        self.drafted_2BQ = self._fresh_drafted.repeat(1, batch, 1)

    def serves(self, batch: int, device: torch.device) -> bool:
        """Return True if the tables fit so many sequences."""
        return self.copied_2BL.shape[1] == batch and self.copied_2BL.device == device

    def begin(self) -> None:
        """Forget the text before."""
        self.copied_2BL.copy_(self._fresh_copied.expand_as(self.copied_2BL))
        self.drafted_2BQ.copy_(self._fresh_drafted.expand_as(self.drafted_2BQ))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tables, which are updated in place."""
        return self.copied_2BL, self.drafted_2BQ

    def choose(
        self, own: TokenTree, copy_BK: Tensor, matched_B: Tensor, keep: int
    ) -> tuple[TokenTree, Candidates]:
        """Select the `keep` most probable nodes below the root, of which the parents are selected too.

        A node that the copy runs through is as probable as the draft or the copy says, whichever is more.

        Args:
            own: the draft's tree, with `score_BN`.
            copy_BK: tokens that follow the root in the copy.
            matched_B: tokens of the match.
            keep: M, at most N - 1 nodes of the draft and the copied ones that are not among these.

        Returns:
            the tree, the draft's nodes first, and what `learn` needs.
        """
        assert own.score_BN is not None
        (B, N), K, device = own.tokens_BN.shape, copy_BK.shape[1], copy_BK.device
        step_K = torch.arange(K, device=device)
        depth_BN = own.depth_N.expand(B, N)
        sees_BNN = visible(own.parents_BN)
        length_BK = torch.bucketize(matched_B[:, None] + step_K, self._ends)
        accepted_BL, seen_BL = self.copied_2BL
        copied_BK = (accepted_BL / seen_BL).log().gather(1, length_BK).cumsum(1)
        confidence_BN = (own.score_BN / -STEP).long().clamp(min=0, max=CLASSES - 1)
        accepted_BQ, seen_BQ = self.drafted_2BQ
        # a less confident node is never held for more probable; within a class the draft's order counts
        rate_BQ = (accepted_BQ / seen_BQ).cummin(1).values.log()
        drafted_BN = rate_BQ.gather(1, confidence_BN) + 1e-3 * own.score_BN.to(rate_BQ.dtype)

        through_BN = runs_through(own, copy_BK, sees_BNN)
        at_BN = (depth_BN - 1).clamp(min=0)
        by_copy_BN = copied_BK.gather(1, at_BN).where(through_BN, _NEVER)
        drafted_BN = drafted_BN.maximum(by_copy_BN)
        shared_B1, below_B1 = deepest(own, through_BN)
        tail_BK = copied_BK.where(step_K >= shared_B1, _NEVER)

        # C = N - 1 + K candidates; in their order a parent is before its children, which breaks ties
        score_BC = torch.cat((drafted_BN[:, 1:], tail_BK), 1)
        order_BC = score_BC.sort(dim=1, descending=True, stable=True).indices
        kept_BM = order_BC[:, :keep].sort(dim=1).values
        above_BK = torch.where(step_K == shared_B1, below_B1, N - 1 + step_K)  # in nodes: 1 + candidate
        above_BC = torch.cat((own.parents_BN[:, 1:], above_BK), 1)
        place_BX = torch.zeros(B, N + K, dtype=torch.int64, device=device)  # of node 1 + c among those kept
        place_BX.scatter_(1, kept_BM + 1, torch.arange(1, keep + 1, device=device).expand(B, -1))
        root_B1 = torch.zeros_like(shared_B1)
        tokens_BC = torch.cat((own.tokens_BN[:, 1:], copy_BK), 1)
        depth_BC = torch.cat((depth_BN[:, 1:], (step_K + 1).expand(B, -1)), 1)
        tree = TokenTree(
            torch.cat((own.tokens_BN[:, :1], tokens_BC.gather(1, kept_BM)), 1),
            torch.cat((root_B1 - 1, place_BX.gather(1, above_BC.gather(1, kept_BM))), 1),
            torch.cat((root_B1, depth_BC.gather(1, kept_BM)), 1),
            copied=K,
            copied_B1=(kept_BM >= N - 1).sum(1, keepdim=True),
        )
        return tree, Candidates(own, sees_BNN, confidence_BN, copy_BK, length_BK)

    def learn(self, seen: Candidates, tree: TokenTree, verdict: Verdict) -> None:
        """Compare what was proposed with the tokens that followed the root, verified or not.

        Args:
            seen: of the cycle.
            tree: the tree that was verified.
            verdict: its accepted path; nothing is learned from a finished sequence.
        """
        n_B1, K = verdict.n_B[:, None], seen.copy_BK.shape[1]
        text_BP = tree.tokens_BN.gather(1, verdict.path_BP).roll(-1, 1)
        step_P = torch.arange(text_BP.shape[1], device=text_BP.device)
        text_BP = text_BP.where(step_P < n_B1 - 1, verdict.next_B[:, None]).where(step_P < n_B1, -1)
        same_BK = seen.copy_BK == text_BP[:, :K]
        right_BK = same_BK.long().cumprod(1)
        reached_BK = torch.cat((torch.ones_like(right_BK[:, :1]), right_BK[:, :-1]), 1)
        tried_BK = reached_BK * (step_P[:K] < n_B1)
        _count(self.copied_2BL, seen.length_BK, right_BK, tried_BK)
        through_BN = runs_through(seen.own, text_BP, seen.sees_BNN)[:, 1:]
        tried_BN = (n_B1 > 0).expand_as(through_BN)
        _count(self.drafted_2BQ, seen.confidence_BN[:, 1:], through_BN & tried_BN, tried_BN)


def runs_through(own: TokenTree, text_BK: Tensor, sees_BNN: Tensor) -> Tensor:
    """Return which nodes a text after the root runs through, the root included; bool_BN.

    Args:
        own: a tree, at most K levels deep.
        text_BK: tokens after the root.
        sees_BNN: mask of each node's ancestors and itself.
    """
    depth_BN = own.depth_N.expand(own.tokens_BN.shape)
    same_BN = own.tokens_BN == text_BK.gather(1, (depth_BN - 1).clamp(min=0))
    same_BN = same_BN | (depth_BN == 0)
    return (same_BN[:, None] | ~sees_BNN).all(2)


def deepest(own: TokenTree, through_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return depth and index [B, 1] of the deepest of some nodes of a tree; of several, the first."""
    B, N = own.tokens_BN.shape
    place_BN = own.depth_N.expand(B, N) * N + (N - 1 - torch.arange(N, device=through_BN.device))
    best_B1 = place_BN.where(through_BN, -1).amax(1, keepdim=True)
    return best_B1 // N, N - 1 - best_B1 % N


def _count(table_2BX: Tensor, class_BY: Tensor, accepted_BY: Tensor, tried_BY: Tensor) -> None:
    """Add accepted and tried nodes to their classes, in place."""
    table_2BX[0].scatter_add_(1, class_BY, accepted_BY.to(table_2BX.dtype))
    table_2BX[1].scatter_add_(1, class_BY, tried_BY.to(table_2BX.dtype))
