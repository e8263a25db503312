"""The loss of a draft with a vocabulary of its own against its teacher, from the logits of both.

The formulas are those of `losses.draft`. Triton if `kernels.devices` allows it: the teacher's logits are read
once, the draft's are read in their own dtype and overwritten by their gradient, and nothing else as large as
the logits is written but the teacher's logits of the draft's tokens. Plain torch (`reference`) everywhere
else and for fp64.

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
    """

    row_JB: Tensor
    weight_JB: Tensor
    value_JB: Tensor
    hit_JB: Tensor


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


def teacher_of(logit_BV: Tensor, draft_ids_K: Tensor) -> TeacherLogits:
    """Reduce the teacher's logits over its vocabulary.

    Args:
        logit_BV: logits, the last dim contiguous.
        draft_ids_K: the teacher's token id of each token of the draft's vocabulary, int64.
    """
    if kernels_serve(logit_BV):
        from longtrain.kernels.draft_loss import launch

        return TeacherLogits(*launch.teacher_of(logit_BV, draft_ids_K))
    return TeacherLogits(*reference.teacher_of(logit_BV, draft_ids_K))


def draft_passes(
    logit_JBK: Tensor,
    teacher: TeacherLogits,
    draft_ids_K: Tensor,
    pairs: DraftPairs,
    *,
    objective: str,
    kl_decay: float,
    gradient: bool,
) -> None:
    """Write the loss of every pair of a pass and a token; with `gradient` also write that of the logits.

    Args:
        logit_JBK: the draft's logits, contiguous.
        teacher: from `teacher_of`.
        draft_ids_K: the teacher's token id of each token of the draft's vocabulary, int64.
        pairs: pairs to learn from, and output buffers.
        objective: kl, lk, tv or lk_hybrid.
        kl_decay: decay of the KL weight in lk_hybrid.
        gradient: True to overwrite the logits by the gradient of the weighted loss.
    """
    if kernels_serve(logit_JBK):
        from longtrain.kernels.draft_loss.launch import draft_passes as run
    else:
        run = reference.draft_passes
    run(logit_JBK, teacher, draft_ids_K, pairs, objective=objective, kl_decay=kl_decay, gradient=gradient)
