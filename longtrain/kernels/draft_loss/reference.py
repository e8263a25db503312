"""The reference implementation of `kernels.draft_loss` in plain torch: fp32 inside (fp64 for fp64).

Shapes: as there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

if TYPE_CHECKING:
    from longtrain.kernels.draft_loss import DraftPairs, TeacherLogits

LEAST = 1e-12
"""The accepted share counts as at least this in a logarithm or below a fraction line."""


def teacher_of(logit_BV: Tensor, draft_ids_K: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.draft_loss.teacher_of`."""
    wide = torch.promote_types(logit_BV.dtype, torch.float32)
    logit_BK = logit_BV.index_select(1, draft_ids_K).to(wide)
    return logit_BK, logit_BV.to(wide).logsumexp(-1), logit_BK.logsumexp(-1), logit_BV.argmax(-1)


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
    """See `kernels.draft_loss.draft_passes`."""
    known_JB = pairs.row_JB >= 0
    torch.logical_and(draft_ids_K[logit_JBK.argmax(-1)] == teacher.best_B, known_JB, out=pairs.hit_JB)
    wide = torch.promote_types(logit_JBK.dtype, torch.float32)
    logp_BK = teacher.logit_BK - teacher.all_B[:, None]
    logn_BK = teacher.logit_BK - teacher.known_B[:, None]
    for j, logit_BK in enumerate(logit_JBK):
        weight_B = pairs.weight_JB[j] * known_JB[j]
        logq_BK = log_softmax(logit_BK, dim=-1, dtype=wide)
        value_B, grad_BK = _value(objective, logq_BK, logp_BK, logn_BK, kl_decay)
        pairs.value_JB[j] = value_B * weight_B
        if gradient:
            logit_BK.copy_(grad_BK.mul_(weight_B[:, None]))


def _value(
    objective: str, logq_BK: Tensor, logp_BK: Tensor, logn_BK: Tensor, kl_decay: float
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and its gradient with respect to the draft's logits; overwrites `logq_BK`.

    Args:
        objective: see `draft_passes`.
        logq_BK: log probabilities of the draft.
        logp_BK: log probabilities of the teacher among all of its tokens.
        logn_BK: the same, normalised over the draft's tokens.
        kl_decay: see `draft_passes`.
    """
    kl_B = accept_B = torch.zeros(())
    if objective in ("kl", "lk_hybrid"):
        norm_BK = logn_BK.exp()
        kl_B = torch.linalg.vecdot(norm_BK, logn_BK - logq_BK)
    q_BK = logq_BK.exp_()
    if objective == "kl":
        return kl_B, q_BK.sub_(norm_BK)
    p_BK = logp_BK.exp()
    accept_B = torch.minimum(p_BK, q_BK).sum(-1)
    below_BK = q_BK.where(q_BK < p_BK, 0.0)  # where a larger q is accepted more often
    fall_BK = (q_BK * below_BK.sum(-1, keepdim=True)).sub_(below_BK)  # of -accept
    if objective == "tv":
        return 1 - accept_B, fall_BK
    if objective == "lk":
        accept_B = accept_B.clamp(min=LEAST)
        return -accept_B.log(), fall_BK.div_(accept_B[:, None])
    mix_B = torch.exp(-kl_decay * accept_B)
    grad_BK = q_BK.sub_(norm_BK).mul_(mix_B[:, None]).add_(fall_BK.mul_(1 - mix_B[:, None]))
    return mix_B * kl_B + (1 - mix_B) * (1 - accept_B), grad_BK
