"""The most probable nodes of a draft's tree and of a copied continuation together, by what a text accepted.

Two tables say how probable a node is: of the copied tokens those accepted after a match of the same length,
of the draft's nodes those accepted at the same confidence. `choose` selects nodes by the tables, and `learn`
updates the tables with the tokens that followed.

One Triton kernel for each if `kernels.devices` supports it, else plain torch (`reference`), which launches
dozens of small operations. Both update the tables alike to the last bit, and choose the same nodes unless two
of them are equally probable but for rounding: the device's logarithm and its order of summation may differ
from torch's in the last bits. Exact ties always go to the earlier candidate.

Shapes: B batch, N nodes of the draft's tree, K copied tokens, X nodes of the chosen tree, P path, L classes
of match length, Q classes of confidence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longtrain.errors import ConfigError, refusal
from longtrain.kernels.devices import runs_on
from longtrain.kernels.node_choice import reference
from longtrain.kernels.node_choice.reference import deepest, runs_through

__all__ = ["Candidates", "Rates", "choose", "deepest", "learn", "runs_through"]


@dataclass(frozen=True)
class Candidates:
    """What a draft and a copy proposed below the roots of a batch. Integers are int64, tokens 0 or more.

    Args:
        tokens_BN: tokens of the draft's tree, the root's first.
        parents_BN: parent of each node, smaller than the node's own index; -1 for the root.
        depth_BN: depth of each node, 0 for the root.
        score_BN: cumulative log-probability of each node by the draft, 0 for the root; may be -inf.
        copy_BK: tokens that follow the root in the copy.
        matched_B: tokens of the match that is copied from.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_BN: Tensor
    score_BN: Tensor
    copy_BK: Tensor
    matched_B: Tensor


@dataclass(frozen=True)
class Rates:
    """The tables: row 0 has the accepted nodes of each class, row 1 those tried, at least as many.

    Args:
        copied_2BL: of the copied tokens, by class of match length; fp32, contiguous, above 0.
        drafted_2BQ: of the draft's nodes, by class of confidence, likewise.
        ends_E: longest match of each class of length but the last, which has all longer ones; E = L - 1,
            ascending int64.
        step: width of a class of confidence in nats; the last has all below.
    """

    copied_2BL: Tensor
    drafted_2BQ: Tensor
    ends_E: Tensor
    step: float


def choose(found: Candidates, rates: Rates, keep: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select the `keep` most probable nodes below the root; their parents are always among them.

    A node that the copy runs through is as probable as the draft or the copy says, whichever is more. The
    copied tokens that are no nodes of the draft continue below the deepest node that the copy runs through.

    Args:
        found: the candidates.
        rates: the tables.
        keep: X - 1, at most N - 1 nodes of the draft and the copied ones that are not among these.

    Returns:
        tokens_BX, parents_BX and depth_BX of the chosen nodes, the root first, then the draft's, then the
        copied; and copied_B1, the number of these. int64.

    Raises:
        ConfigError: `keep` is not from 1 to N - 1 + K. That as many are left where the copy runs through the
            draft's nodes is for the caller to see to: to check it the host would wait for the device.
    """
    most = found.tokens_BN.shape[1] - 1 + found.copy_BK.shape[1]
    if not 1 <= keep <= most:
        raise refusal(ConfigError, f"keep={keep}", f"1 to {most}, the nodes and the copied tokens")
    if not runs_on(found.copy_BK.device):
        return reference.choose(found, rates, keep)
    from longtrain.kernels.node_choice import kernel

    return kernel.choose(found, rates, keep)


def learn(
    found: Candidates, rates: Rates, tokens_BX: Tensor, path_BP: Tensor, n_B: Tensor, next_B: Tensor
) -> None:
    """Add what was proposed to the tables, and how much of it the text confirmed, verified or not.

    Each copied token is tried of which all before were right, and each node of the draft.

    Args:
        found: the candidates.
        rates: the tables, which are updated in place.
        tokens_BX: tokens of the tree that was verified.
        path_BP: its accepted nodes, the root first; P >= K.
        n_B: number of valid nodes of the path; a sequence with 0 teaches nothing.
        next_B: the token after them.
    """
    if not runs_on(found.copy_BK.device):
        reference.learn(found, rates, tokens_BX, path_BP, n_B, next_B)
        return
    from longtrain.kernels.node_choice import kernel

    kernel.learn(found, rates, tokens_BX, path_BP, n_B, next_B)
