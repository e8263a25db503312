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


def teacher_of(logit_BV: Tensor, draft_ids_K: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.draft_loss.teacher_of`."""
    wide = torch.promote_types(logit_BV.dtype, torch.float32)
    wide_BV = logit_BV.to(wide)
    all_B, best_B = wide_BV.logsumexp(-1), logit_BV.argmax(-1)
    if draft_ids_K is None:
        return wide_BV, all_B, all_B, best_B
    logit_BK = wide_BV.index_select(1, draft_ids_K)
    return logit_BK, all_B, logit_BK.logsumexp(-1), best_B


def draft_passes(
    logit_JBK: Tensor,
    teacher: TeacherLogits,
    draft_ids_K: Tensor | None,
    pairs: DraftPairs,
    *,
    objective: str,
    factor: float,
    gradient: bool,
) -> None:
    """See `kernels.draft_loss.draft_passes`; `factor` is the objective's own, `kl_decay` or `ce_share`."""
    known_JB = pairs.row_JB >= 0
    guess_JB = logit_JBK.argmax(-1)
    guess_JB = guess_JB if draft_ids_K is None else draft_ids_K[guess_JB]
    torch.logical_and(guess_JB == teacher.best_B, known_JB, out=pairs.hit_JB)
    wide = torch.promote_types(logit_JBK.dtype, torch.float32)
    logp_BK = teacher.logit_BK - teacher.all_B[:, None]
    logn_BK = teacher.logit_BK - teacher.known_B[:, None]
    for j, logit_BK in enumerate(logit_JBK):
        weight_B = pairs.weight_JB[j] * known_JB[j]
        logq_BK = log_softmax(logit_BK, dim=-1, dtype=wide)
        if pairs.accept_JB is not None:
            pairs.accept_JB[j] = torch.minimum(logp_BK, logq_BK).exp_().sum(-1) * known_JB[j]
        if objective == "ce_tv":
            assert pairs.label_JB is not None
            value_B, grad_BK = _mixed(logq_BK, logp_BK, pairs.label_JB[j][:, None], factor)
        else:
            value_B, grad_BK = _value(objective, logq_BK, logp_BK, logn_BK, factor)
        pairs.value_JB[j] = value_B * weight_B
        if gradient:
            logit_BK.copy_(grad_BK.mul_(weight_B[:, None]))


def _mixed(logq_BK: Tensor, logp_BK: Tensor, label_B1: Tensor, ce_share: float) -> tuple[Tensor, Tensor]:
    """The `ce_tv` loss of each token, and its gradient; overwrites `logq_BK`."""
    ce_B = -logq_BK.gather(-1, label_B1)[:, 0]
    tv_B, fall_BK = _value("tv", logq_BK, logp_BK, logp_BK, 0.0)
    # `logq_BK` holds the draft's probabilities now
    grad_BK = logq_BK.scatter_add(-1, label_B1, torch.full_like(label_B1, -1, dtype=logq_BK.dtype))
    grad_BK.mul_(ce_share).add_(fall_BK, alpha=1 - ce_share)
    return ce_share * ce_B + (1 - ce_share) * tv_B, grad_BK


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
