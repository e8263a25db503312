"""The nodes of a joined tree: the most probable of the draft's and of the copy's, by what this text accepted.

Two tables on the device say how probable a node is. A copied token is accepted as often as the tokens after a
match of its length were: behind each accepted token the match is one longer. A drafted node is accepted as
often as those of its confidence. Both begin with a prior and are updated from the tokens of every cycle.

The choice and the update are those of `kernels.node_choice`: no value is read back to the host.

Shapes: B batch, N nodes of the draft, K copied tokens, X nodes of the chosen tree, L classes of match length,
Q classes of confidence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.decoding.roles import TokenTree, Verdict
from longtrain.kernels import node_choice
from longtrain.kernels.node_choice import Candidates, Rates

LENGTHS = (0, 1, 2, 3, 4, 6, 9, 14, 22)
"""Longest match of each class; the last class has all longer ones."""
PRIOR = (0.02, 0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
"""Acceptance expected of the token after a match, by class, before this text has shown any."""
STEP, CLASSES = 0.5, 16
"""Width of a class of confidence in nats of log-probability, and the number of classes."""
WEIGHT = 4.0
"""Tokens that a prior counts as."""


class NodeSplit:
    """Chooses the nodes that are verified; it learns from a text's own accepted tokens.

    Args:
        batch: number of sequences.
        device: device of the tables.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        step_Q = torch.arange(CLASSES, dtype=torch.float32, device=device)
        prior_L = torch.tensor(PRIOR, device=device)
        prior_Q = (-STEP * (step_Q + 0.5)).exp()
        # [2, B, classes]: accepted, and seen
        self._fresh_copied = WEIGHT * torch.stack((prior_L, torch.ones_like(prior_L)))[:, None]
        self._fresh_drafted = WEIGHT * torch.stack((prior_Q, torch.ones_like(prior_Q)))[:, None]
        fresh = self._fresh_copied.repeat(1, batch, 1), self._fresh_drafted.repeat(1, batch, 1)
        self.rates = Rates(*fresh, torch.tensor(LENGTHS, device=device), STEP)

    def serves(self, batch: int, device: torch.device) -> bool:
        """Return True if the tables fit so many sequences."""
        copied_2BL = self.rates.copied_2BL
        return copied_2BL.shape[1] == batch and copied_2BL.device == device

    def begin(self) -> None:
        """Forget the text before."""
        self.rates.copied_2BL.copy_(self._fresh_copied.expand_as(self.rates.copied_2BL))
        self.rates.drafted_2BQ.copy_(self._fresh_drafted.expand_as(self.rates.drafted_2BQ))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tables, which are updated in place."""
        return self.rates.copied_2BL, self.rates.drafted_2BQ

    def choose(
        self, own: TokenTree, copy_BK: Tensor, matched_B: Tensor, keep: int
    ) -> tuple[TokenTree, Candidates]:
        """Select the `keep` most probable nodes below the root, of which the parents are selected too.

        A node that the copy runs through is as probable as the draft or the copy says, whichever is more.

        Args:
            own: the draft's tree, with `score_BN`.
            copy_BK: tokens that follow the root in the copy.
            matched_B: tokens of the match.
            keep: X - 1, at most N - 1 nodes of the draft and the copied ones that are not among these.

        Returns:
            the tree, the draft's nodes first, and what `learn` needs.
        """
        assert own.score_BN is not None
        depth_BN = own.depth_N.expand_as(own.tokens_BN)
        found = Candidates(own.tokens_BN, own.parents_BN, depth_BN, own.score_BN, copy_BK, matched_B)
        tokens_BX, parents_BX, depth_BX, copied_B1 = node_choice.choose(found, self.rates, keep)
        tree = TokenTree(tokens_BX, parents_BX, depth_BX, copied=copy_BK.shape[1], copied_B1=copied_B1)
        return tree, found

    def learn(self, found: Candidates, tree: TokenTree, verdict: Verdict) -> None:
        """Compare what was proposed with the tokens that followed the root, verified or not.

        Args:
            found: what was proposed in the cycle.
            tree: the tree that was verified.
            verdict: its accepted path; nothing is learned from a finished sequence.
        """
        node_choice.learn(found, self.rates, tree.tokens_BN, verdict.path_BP, verdict.n_B, verdict.next_B)
