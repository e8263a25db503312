"""Losses of a draft with its own head and vocabulary against its teacher's distribution.

A draft's later passes predict the same tokens from further back: position w - j of pass j and the teacher's
position w predict one token. So a block of teacher positions is computed once and serves all passes. With q
the draft's distribution over its own K tokens, p the teacher's probabilities of these among all V,
p~ = p / sum p, and a = sum min(p, q), the probability that the teacher accepts a draft:

    kl         sum p~ log(p~ / q)
    lk         -log a
    tv         1 - a
    lk_hybrid  w kl + (1 - w) tv,  w = exp(-kl_decay a), a constant for the gradient

Shapes: J passes, R positions of a pass, W teacher positions, B teacher positions of a block, E hidden dim, V
vocabulary, K tokens of the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longtrain.kernels.draft_loss import DraftPairs, draft_passes, teacher_of
from longtrain.losses.blocks import HeadLoss, kernel_rows_of, operands, plain, scaled

DRAFT_OBJECTIVES = ("kl", "lk", "lk_hybrid", "tv")


class DraftTeacher(NamedTuple):
    """The teacher that a draft is trained against.

    Args:
        hidden_WE: the teacher's input of its head, for each token to learn.
        head_VE: its head.
        draft_ids_K: the teacher's token id of each token of the draft's vocabulary, int64.
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
    """The weighted sum of a loss over passes and teacher positions; logits exist for one block at a time.

    Gradients for the passes' hidden states and, if it requires one, the draft's head are computed in the
    forward; the head's is summed in fp32 (fp64 in fp64).

    Args:
        passes: the draft's input of its head, J times [R, E].
        head_KE: the draft's head.
        teacher: its teacher; no gradient flows into it.
        row_JW: the position of pass j that predicts the same token as the teacher's position w, int64; -1:
            none. Within a pass no position may occur twice.
        weight_JW: weight of each pair.
        objective: one of `DRAFT_OBJECTIVES`.
        kl_decay: decay of the KL weight in `lk_hybrid`.
        block_rows: number of teacher positions whose logits exist at once; 0: as many as fit the budget.

    Returns:
        the sum, and as `hit_T` bool_JW: True if the draft's most likely token is the teacher's.

    Source: EAGLE-3 §3.2 for kl; SpecForge's and speculators' code for the others.
    """
    J, W = len(passes), len(teacher.hidden_WE)
    hidden_WE, head_VE = operands(teacher.hidden_WE.detach(), teacher.head_VE.detach())
    teacher = DraftTeacher(hidden_WE, head_VE, teacher.draft_ids_K)
    numbers = len(head_VE) + (J + 1) * len(teacher.draft_ids_K)
    rows = block_rows or kernel_rows_of(head_VE, numbers, W)
    settings = (objective, kl_decay, rows)
    return HeadLoss(*_DraftLoss.apply(head_KE, teacher, row_JW, weight_JW, settings, *passes))


class _DraftLoss(torch.autograd.Function):
    """Computes gradients in the forward, block by block; backward scales them."""

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
        hidden_NE = torch.cat(passes)  # [J * R, E], pass after pass
        row_JW, weight_JW = row_JW.contiguous(), weight_JW.to(wide).contiguous()
        missing_JW = row_JW < 0
        at_JW = row_JW + R * torch.arange(J, device=row_JW.device)[:, None]
        from_JW, to_JW = at_JW.masked_fill(missing_JW, 0), at_JW.masked_fill(missing_JW, J * R)
        value_JW = torch.empty_like(weight_JW)
        hit_JW = torch.empty(J, W, dtype=torch.bool, device=head_KE.device)
        grad_KE = torch.zeros_like(head_KE, dtype=wide) if need_head else None
        grad_NE = hidden_NE.new_zeros(J * R + 1, E) if need_hidden else None  # the last: missing pairs
        with plain(head_KE):
            for a in range(0, W, rows):
                part = slice(a, a + rows)
                found = teacher_of(teacher.hidden_WE[part] @ teacher.head_VE.t(), teacher.draft_ids_K)
                h_NE = hidden_NE.index_select(0, from_JW[:, part].flatten()).to(low_KE.dtype)
                logit_NK = h_NE @ low_KE.t()
                draft_passes(
                    logit_NK.unflatten(0, (J, -1)),
                    found,
                    teacher.draft_ids_K,
                    DraftPairs(*(x_JW[:, part] for x_JW in (row_JW, weight_JW, value_JW, hit_JW))),
                    objective=objective,
                    kl_decay=kl_decay,
                    gradient=need_head or need_hidden,
                )  # the logits are their gradient now
                if grad_NE is not None:
                    back_NE = (logit_NK @ low_KE).to(grad_NE.dtype)
                    grad_NE.index_copy_(0, to_JW[:, part].flatten(), back_NE)
                if grad_KE is not None:
                    grad_KE += logit_NK.t() @ h_NE
        ctx.save_for_backward(grad_KE, grad_NE)
        ctx.mark_non_differentiable(hit_JW)
        ctx.passes = (J, R)
        return value_JW.sum(), hit_JW

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming one."""
        head, hidden_NE = (scaled(grad, grads[0]) for grad in ctx.saved_tensors)
        J, R = ctx.passes
        passes = [None] * J if hidden_NE is None else hidden_NE[: J * R].split(R)
        return head, None, None, None, None, *passes
