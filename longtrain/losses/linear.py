"""Losses of a student that shares the teacher's head, or is trained on the tokens of the data.

Shapes: T tokens, E hidden dim, V vocabulary, K most likely tokens of a distribution, R tokens of one block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from longtrain.kernels.head_kl import head_kl
from longtrain.losses.blocks import (
    IGNORE,
    HeadLoss,
    TopTokens,
    block_rows_of,
    operands,
    plain,
    scaled,
)


def fused_linear_ce(
    hidden_TE: Tensor,
    head_weight_VE: Tensor,
    labels_T: Tensor,
    *,
    weights_T: Tensor | None = None,
    block_rows: int = 0,
) -> Tensor:
    """Cross-entropy of `hidden @ head.T` against labels, summed: Liger's kernel on CUDA, else plain torch.

    Args:
        hidden_TE: input of the head.
        head_weight_VE: the head; it gets a gradient only if it requires one.
        labels_T: int64, `IGNORE` for tokens that are not trained on.
        weights_T: weight of each token (with weights plain torch is used on CUDA too); None: 1.
        block_rows: number of tokens whose logits exist at once in plain torch; 0: as many as fit the budget.

    Returns:
        scalar sum over tokens, nats, fp32 (fp64 stays fp64).
    """
    if hidden_TE.is_cuda and weights_T is None and not block_rows:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # needs triton: CUDA only

        hidden_TE, head_weight_VE = operands(hidden_TE, head_weight_VE)
        loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="sum")
        return loss(head_weight_VE, hidden_TE, labels_T)
    if weights_T is None:
        weights_T = torch.ones_like(labels_T, dtype=torch.float32)
    rows = block_rows or block_rows_of(head_weight_VE)
    return _LinearCE.apply(*operands(hidden_TE, head_weight_VE), labels_T, weights_T, rows)


def fused_linear_kl(
    hidden_TE: Tensor,
    teacher_hidden_TE: Tensor,
    head_weight_VE: Tensor,
    *,
    weights_T: Tensor | None = None,
    block_rows: int = 0,
) -> HeadLoss:
    """KL(teacher || student) over the whole vocabulary, summed over tokens; both share one frozen head.

    The gradient with respect to the student's hidden states is computed in the forward, one block of tokens
    at a time: `(softmax(student) - softmax(teacher)) @ head`, softmax in fp32. T x V never exists.

    Args:
        hidden_TE: the student's input of the head.
        teacher_hidden_TE: the teacher's; no gradient flows into it.
        head_weight_VE: the shared head; it gets no gradient.
        weights_T: weight of each token; None: 1.
        block_rows: number of tokens whose logits exist at once; 0: as many as fit the budget.
    """
    if weights_T is None:
        weights_T = torch.ones(hidden_TE.shape[0], device=hidden_TE.device)
    rows = block_rows or block_rows_of(head_weight_VE)
    hidden_TE, head_weight_VE = operands(hidden_TE, head_weight_VE.detach())
    teacher_TE = teacher_hidden_TE.detach().to(hidden_TE.dtype)
    return HeadLoss(*_LinearKL.apply(hidden_TE, teacher_TE, head_weight_VE, weights_T, rows))


def fused_linear_top_kl(
    hidden_TE: Tensor,
    teacher: TopTokens,
    head_weight_VE: Tensor,
    *,
    weights_T: Tensor | None = None,
    block_rows: int = 0,
) -> HeadLoss:
    """KL(teacher || student) if only the teacher's most likely tokens are known, summed over tokens.

    All other tokens count as one: the KL of the two distributions after that merger, which is never above the
    exact one and equal to it with K = V. The gradient is computed in the forward, as in `fused_linear_kl`.

    Args:
        hidden_TE: the student's input of the head.
        teacher: the most likely tokens at each position.
        head_weight_VE: the student's head; it gets no gradient.
        weights_T: weight of each position; None: 1.
        block_rows: number of positions whose logits exist at once; 0: as many as fit the budget.
    """
    if weights_T is None:
        weights_T = torch.ones(hidden_TE.shape[0], device=hidden_TE.device)
    rows = block_rows or block_rows_of(head_weight_VE)
    hidden_TE, head_weight_VE = operands(hidden_TE, head_weight_VE.detach())
    return HeadLoss(*_LinearTopKL.apply(hidden_TE, *teacher, head_weight_VE, weights_T, rows))


@torch.no_grad()
def top_tokens(hidden_TE: Tensor, head_weight_VE: Tensor, k: int) -> TopTokens:
    """The `k` most likely next tokens at each position, by `softmax(hidden @ head.T)` in fp32."""
    hidden_TE, head_weight_VE = operands(hidden_TE, head_weight_VE)
    found = []
    with plain(hidden_TE):
        for h_RE in hidden_TE.split(block_rows_of(head_weight_VE)):
            logp_RV = log_softmax(h_RE @ head_weight_VE.t(), dim=-1, dtype=torch.float32)
            found.append(logp_RV.topk(k, dim=-1))
    return TopTokens(torch.cat([one.indices for one in found]), torch.cat([one.values for one in found]))


@torch.no_grad()
def greedy_hits(
    hidden_TE: Tensor, head_weight_VE: Tensor, labels_T: Tensor, *, block_rows: int = 0
) -> Tensor:
    """True where the argmax of `hidden @ head.T` is the label, bool_T; ignored tokens are False."""
    hidden_TE, head_weight_VE = operands(hidden_TE, head_weight_VE)
    rows = block_rows or block_rows_of(head_weight_VE)
    with plain(hidden_TE):
        blocks = [(h_RE @ head_weight_VE.t()).argmax(-1) for h_RE in hidden_TE.split(rows)]
    return torch.cat(blocks) == labels_T if blocks else labels_T.bool()


class _LinearCE(torch.autograd.Function):
    """Computes gradients in the forward, block by block, for hidden states and, if required, the head."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TE: Tensor, head_VE: Tensor, labels_T: Tensor, weights_T: Tensor, rows: int
    ) -> Tensor:
        wide = torch.promote_types(hidden_TE.dtype, torch.float32)
        need_hidden, need_head = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=wide, device=hidden_TE.device)
        grad_TE = torch.zeros_like(hidden_TE) if need_hidden else None
        grad_VE = torch.zeros_like(head_VE, dtype=wide) if need_head else None
        with plain(hidden_TE):
            for a in range(0, hidden_TE.shape[0], rows):
                part = slice(a, a + rows)
                h_RE, y_R = hidden_TE[part], labels_T[part].clamp(min=0)[:, None]
                w_R1 = (weights_T[part] * (labels_T[part] != IGNORE))[:, None].to(wide)
                logp_RV = log_softmax(h_RE @ head_VE.t(), dim=-1, dtype=wide)
                total -= (logp_RV.gather(-1, y_R) * w_R1).sum()
                if not (need_hidden or need_head):
                    continue
                grad_RV = logp_RV.exp_().scatter_add_(-1, y_R, torch.full_like(w_R1, -1.0)).mul_(w_R1)
                grad_RV = grad_RV.to(head_VE.dtype)
                if grad_TE is not None:
                    grad_TE[part] = grad_RV @ head_VE
                if grad_VE is not None:
                    grad_VE += grad_RV.t() @ h_RE
        ctx.save_for_backward(grad_TE, None if grad_VE is None else grad_VE.to(head_VE.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_TE, grad_VE = ctx.saved_tensors
        return scaled(grad_TE, grads[0]), scaled(grad_VE, grads[0]), None, None, None


class _LinearKL(torch.autograd.Function):
    """KL, the gradient of the student's hidden states and greedy agreement, all computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TE: Tensor, teacher_TE: Tensor, head_VE: Tensor, weights_T: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_TE.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_TE.device)
        hit_T = torch.zeros_like(weights_T, dtype=torch.bool)
        grad_TE = torch.empty_like(hidden_TE) if ctx.needs_input_grad[0] else None
        with plain(hidden_TE):
            for a in range(0, hidden_TE.shape[0], rows):
                part = slice(a, a + rows)
                w_R = weights_T[part].to(wide)
                student_RV, teacher_RV = hidden_TE[part] @ head_VE.t(), teacher_TE[part] @ head_VE.t()
                kl_R, hit_R = head_kl(student_RV, teacher_RV, w_R, gradient=grad_TE is not None)
                total += kl_R.sum()
                hit_T[part] = hit_R & (w_R > 0)
                if grad_TE is not None:  # the student's logits are their gradient now
                    torch.mm(student_RV, head_VE, out=grad_TE[part])
        ctx.save_for_backward(grad_TE)
        ctx.mark_non_differentiable(hit_T)
        return total, hit_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return scaled(ctx.saved_tensors[0], grads[0]), None, None, None, None


class _LinearTopKL(torch.autograd.Function):
    """As `_LinearKL`; tokens beyond the teacher's K are one outcome: only their total probability counts."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        ids_TK: Tensor,
        logp_TK: Tensor,
        head_VE: Tensor,
        weights_T: Tensor,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_TE.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_TE.device)
        hit_T = torch.zeros_like(weights_T, dtype=torch.bool)
        grad_TE = torch.zeros_like(hidden_TE) if ctx.needs_input_grad[0] else None
        with plain(hidden_TE):
            for a in range(0, hidden_TE.shape[0], rows):
                part = slice(a, a + rows)
                w_R, ids_RK = weights_T[part].to(wide), ids_TK[part]
                logq_RV = log_softmax(hidden_TE[part] @ head_VE.t(), dim=-1, dtype=wide)
                hit_T[part] = (logq_RV.argmax(-1) == ids_RK[:, 0]) & (w_R > 0)
                p_RK = logp_TK[part].to(wide).exp()
                p_RK = p_RK / p_RK.sum(-1, keepdim=True).clamp(min=1)  # stored numbers are rounded
                rest_R = (1 - p_RK.sum(-1)).clamp(min=0)
                logq_RK = logq_RV.gather(-1, ids_RK)
                logq_rest_R = logq_RV.scatter(-1, ids_RK, -torch.inf).logsumexp(-1)
                some_R = (rest_R > 0) & logq_rest_R.isfinite()  # not so with K = V
                kl_R = (torch.xlogy(p_RK, p_RK) - p_RK * logq_RK).sum(-1)
                kl_R += torch.xlogy(rest_R, rest_R) - (rest_R * logq_rest_R).where(some_R, 0.0)
                total += (kl_R * w_R).sum()
                if grad_TE is not None:
                    keep_R = 1 - (rest_R.log() - logq_rest_R).exp().where(some_R, 0.0)
                    grad_RV = logq_RV.exp_().mul_(keep_R[:, None])
                    grad_RV.scatter_(-1, ids_RK, logq_RK.exp() - p_RK).mul_(w_R[:, None])
                    grad_TE[part] = grad_RV.to(head_VE.dtype) @ head_VE
        ctx.save_for_backward(grad_TE)
        ctx.mark_non_differentiable(hit_T)
        return total, hit_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return scaled(ctx.saved_tensors[0], grads[0]), None, None, None, None, None
