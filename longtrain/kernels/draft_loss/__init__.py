"""The loss of a draft against its teacher, from the logits of both; a draft may have a vocabulary of its own.

The formulas are those of `losses.draft`, and for a draft over the whole vocabulary that learns from the data
too, with y the token of the data and a the accepted share:

    ce_tv      w (-log q_y) + (1 - w) (1 - a),  w = `ce_share`

Triton if `kernels.devices` allows it: logits are read in their own dtype, the draft's are overwritten by
their gradient, and nothing else as large as them is written but the teacher's logits of a smaller vocabulary.
Plain torch (`reference`) everywhere else and for fp64.

Shapes: J passes, B teacher positions (tokens) of a block, V vocabulary of the teacher, K tokens of the
draft's vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longtrain.kernels.devices import kernels_serve
from longtrain.kernels.draft_loss import reference


class DraftPairs(NamedTuple):
    """The pairs of a pass and a teacher position; columns of [J, W] tensors that are contiguous as a whole.

    Args:
        row_JB: below 0 if the pass has no position for this token, int64: loss and gradient are 0 there.
        weight_JB: factor on each loss, fp32 (fp64 for fp64).
        value_JB: output: the weighted loss in nats, in the dtype of the weights.
        hit_JB: output: True if the draft's most likely token is the teacher's; False if there is no position.
        label_JB: for ce_tv the token of the data, int64.
        accept_JB: output: the accepted share, in the dtype of the weights; 0 if there is no position. None:
            it is not asked for.
    """

    row_JB: Tensor
    weight_JB: Tensor
    value_JB: Tensor
    hit_JB: Tensor
    label_JB: Tensor | None = None
    accept_JB: Tensor | None = None


class TeacherLogits(NamedTuple):
    """The teacher's distribution of the next token, restricted to the draft's vocabulary.

    Args:
        logit_BK: its logits of the draft's tokens.
        all_B: logsumexp of its logits over all V tokens, fp32 (fp64 for fp64).
        known_B: logsumexp over the draft's K tokens, as above.
        best_B: its most likely token of all V, int64.
    """

    logit_BK: Tensor
    all_B: Tensor
    known_B: Tensor
    best_B: Tensor


def teacher_of(logit_BV: Tensor, draft_ids_K: Tensor | None) -> TeacherLogits:
    """Reduce the teacher's logits over its vocabulary.

    Args:
        logit_BV: logits, the last dim contiguous; without `draft_ids_K` contiguous as a whole.
        draft_ids_K: the teacher's token id of each token of the draft's vocabulary, int64; None: both have
            the same vocabulary, and the logits are not copied.
    """
    if kernels_serve(logit_BV):
        from longtrain.kernels.draft_loss import launch

        return TeacherLogits(*launch.teacher_of(logit_BV, draft_ids_K))
    return TeacherLogits(*reference.teacher_of(logit_BV, draft_ids_K))


def draft_passes(
    logit_JBK: Tensor,
    teacher: TeacherLogits,
    draft_ids_K: Tensor | None,
    pairs: DraftPairs,
    *,
    objective: str,
    gradient: bool,
    kl_decay: float = 0.0,
    ce_share: float = 0.0,
) -> None:
    """Write the loss of every pair of a pass and a token; with `gradient` also write that of the logits.

    Args:
        logit_JBK: the draft's logits, contiguous.
        teacher: from `teacher_of`.
        draft_ids_K: as in `teacher_of`.
        pairs: pairs to learn from, and output buffers.
        objective: kl, lk, tv, lk_hybrid or ce_tv.
        gradient: True to overwrite the logits by the gradient of the weighted loss.
        kl_decay: decay of the KL weight in lk_hybrid.
        ce_share: weight of the cross-entropy in ce_tv; the rest is that of 1 - a.
    """
    if kernels_serve(logit_JBK):
        from longtrain.kernels.draft_loss.launch import draft_passes as run
    else:
        run = reference.draft_passes
    factor = ce_share if objective == "ce_tv" else kl_decay
    run(logit_JBK, teacher, draft_ids_K, pairs, objective=objective, factor=factor, gradient=gradient)
