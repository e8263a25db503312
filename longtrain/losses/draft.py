"""Losses of a draft with a head and a vocabulary of its own against its teacher's law over all tokens.

A draft's later passes predict the same tokens from further back: pass j of row w - j and the teacher's row w
are about one token. So a block of teacher rows is computed once and serves all passes. With q the draft's law
over its own K tokens, p the teacher's law of these among all V, p~ = p / sum p, and a = sum min(p, q), the
share of drafts that the teacher accepts:

    kl         sum p~ log(p~ / q)
    lk         -log a
    tv         1 - a
    lk_hybrid  w kl + (1 - w) tv,  w = exp(-kl_decay a), a constant for the gradient

Shapes: J passes, R rows of a pass, W teacher rows, B teacher rows of a block, E hidden dim, V vocabulary,
K tokens of the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from longtrain.errors import ConfigError
from longtrain.losses.blocks import HeadLoss, block_rows_of, operands, plain, scaled

DRAFT_OBJECTIVES = ("kl", "lk", "lk_hybrid", "tv")
_LEAST = 1e-12
"""The accepted share counts as at least this in a logarithm or below a fraction line."""


class DraftTeacher(NamedTuple):
    """What a draft learns from.

    Args:
        hidden_WE: the teacher's input of its head, one row for each token that is learned.
        head_VE: its head.
        draft_ids_K: the teacher's token that each token of the draft stands for, int64.
    """

    hidden_WE: Tensor
    head_VE: Tensor
    draft_ids_K: Tensor


def fused_draft_loss(
    passes: Sequence[Tensor],
    head_KE: Tensor,
    teacher: DraftTeacher,
    row_JW: Tensor,
    weight_JW: Tensor,
    *,
    objective: str,
    kl_decay: float = 3.0,
    block_rows: int = 0,
) -> HeadLoss:
    """The weighted sum of a loss over passes and teacher rows; logits exist for a block of rows at a time.

    Gradients for the passes' hidden states and, where it asks for one, the draft's head are found in the
    forward; the head's is summed in fp32 (fp64 in fp64).

    Args:
        passes: the draft's input of its head, J times [R, E].
        head_KE: the draft's head.
        teacher: whom it learns from; no gradient flows into it.
        row_JW: the row of pass j that predicts what the teacher's row w does, int64; -1: none. A pass has at
            most one teacher row for each of its rows.
        weight_JW: weight of each pair.
        objective: one of `DRAFT_OBJECTIVES`.
        kl_decay: of `lk_hybrid`.
        block_rows: teacher rows whose logits exist at once; 0: as many as fit the budget.

    Returns: the sum, and as `hit_T` bool_JW: the draft's likeliest token is the teacher's.
    Raises: ConfigError on shapes that do not fit, or an unknown objective.
    Source: EAGLE-3 §3.2 for kl; SpecForge's and speculators' code for the others.
    """
    if objective not in DRAFT_OBJECTIVES:
        raise ConfigError(f"draft loss objective={objective}; allowed: {', '.join(DRAFT_OBJECTIVES)}")
    J, W = len(passes), len(teacher.hidden_WE)
    fits = len(head_KE) == len(teacher.draft_ids_K) and all(one.shape == passes[0].shape for one in passes)
    if not fits or row_JW.shape != (J, W) or weight_JW.shape != (J, W):
        raise ConfigError(
            f"draft loss: {J} passes of {[tuple(one.shape) for one in passes][:2]}, head "
            f"{tuple(head_KE.shape)}, {W} teacher rows, {len(teacher.draft_ids_K)} draft tokens, rows "
            f"{tuple(row_JW.shape)} and weights {tuple(weight_JW.shape)} do not fit; need J of [R, E], "
            "[K, E], W, K, [J, W] and [J, W]"
        )
    hidden_WE, head_VE = operands(teacher.hidden_WE.detach(), teacher.head_VE.detach())
    law = DraftTeacher(hidden_WE, head_VE, teacher.draft_ids_K)
    rows = block_rows or block_rows_of(law.head_VE)
    settings = (objective, kl_decay, rows)
    return HeadLoss(*_DraftLoss.apply(head_KE, law, row_JW, weight_JW, settings, *passes))


class _DraftLoss(torch.autograd.Function):
    """Gradients in the forward, block by block; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        head_KE: Tensor,
        teacher: DraftTeacher,
        row_JW: Tensor,
        weight_JW: Tensor,
        settings: tuple[str, float, int],
        *passes: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `fused_draft_loss`."""
        objective, kl_decay, rows = settings
        (R, E), J, W = passes[0].shape, len(passes), len(teacher.hidden_WE)
        need_head, need_hidden = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5:])
        low_KE = operands(passes[0][:0], head_KE)[1]
        wide = torch.promote_types(low_KE.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=head_KE.device)
        hit_JW = torch.zeros(J, W, dtype=torch.bool, device=head_KE.device)
        grad_KE = torch.zeros_like(head_KE, dtype=wide) if need_head else None
        spare = 1  # a last row takes what belongs to none
        grads = [one.new_zeros(R + spare, E) for one in passes] if need_hidden else []
        with plain(head_KE):
            for a in range(0, W, rows):
                part = slice(a, a + rows)
                logp_BK, best_B = _law(teacher, part, wide)
                row_JB, weight_JB = row_JW[:, part], weight_JW[:, part].to(wide)
                h_JBE = torch.stack([one[at.clamp(min=0)] for one, at in zip(passes, row_JB, strict=True)])
                h_JBE = h_JBE.to(low_KE.dtype)
                logit_JBK = h_JBE @ low_KE.t()
                guess_JB = teacher.draft_ids_K[logit_JBK.argmax(-1)]
                hit_JW[:, part] = (guess_JB == best_B) & (row_JB >= 0)
                weight_JB = weight_JB * (row_JB >= 0)
                for j in range(J):  # the logits make room for their gradient
                    logq_BK = log_softmax(logit_JBK[j], dim=-1, dtype=wide)
                    value_B, grad_BK = _value(objective, logq_BK, logp_BK, kl_decay)
                    total += (value_B * weight_JB[j]).sum()
                    logit_JBK[j] = grad_BK.mul_(weight_JB[j][:, None])
                if grads:
                    for grad, at, h_BE in zip(grads, row_JB, logit_JBK @ low_KE, strict=True):
                        grad[at] = h_BE.to(grad.dtype)  # -1 is the last row, the spare one
                if grad_KE is not None:
                    grad_KE += logit_JBK.flatten(0, 1).t() @ h_JBE.flatten(0, 1)
        ctx.save_for_backward(grad_KE, *(grad[:R] for grad in grads))
        ctx.mark_non_differentiable(hit_JW)
        return total, hit_JW

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming one."""
        head, *passes = (scaled(grad, grads[0]) for grad in ctx.saved_tensors)
        passes = passes or [None] * (len(ctx.needs_input_grad) - 5)
        return head, None, None, None, None, *passes


def _law(teacher: DraftTeacher, part: slice, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The teacher's log-law of the draft's tokens among all of its own, and its likeliest token."""
    logit_BV = teacher.hidden_WE[part] @ teacher.head_VE.t()
    best_B = logit_BV.argmax(-1)
    chosen_BK = logit_BV.index_select(1, teacher.draft_ids_K).to(wide)
    return chosen_BK.sub_(logit_BV.to(wide).logsumexp(-1, keepdim=True)), best_B


def _value(objective: str, logq_BK: Tensor, logp_BK: Tensor, kl_decay: float) -> tuple[Tensor, Tensor]:
    """A row's loss, and its gradient with respect to the draft's logits; `logq_BK` is used up."""
    kl_B = accept_B = torch.zeros(())
    if objective in ("kl", "lk_hybrid"):
        logn_BK = logp_BK - logp_BK.logsumexp(-1, keepdim=True)
        norm_BK = logn_BK.exp()
        kl_B = torch.linalg.vecdot(norm_BK, logn_BK.sub_(logq_BK))
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
        accept_B = accept_B.clamp(min=_LEAST)
        return -accept_B.log(), fall_BK.div_(accept_B[:, None])
    mix_B = torch.exp(-kl_decay * accept_B)
    grad_BK = q_BK.sub_(norm_BK).mul_(mix_B[:, None]).add_(fall_BK.mul_(1 - mix_B[:, None]))
    return mix_B * kl_B + (1 - mix_B) * (1 - accept_B), grad_BK
