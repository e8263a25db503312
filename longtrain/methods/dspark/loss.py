"""The loss of drafted tokens on the target's LM head with a Markov correction, a block of rows at a time.

With z = h U' + b W2' the logits of a slot (h the draft's state, U the target's head, b the Markov embedding
of the token before), q = softmax(z), p the target's distribution and y the token of the data:

    ce_l1      value = ce * (-log q_y) + l1 * sum |q - p|
               d value / dz = ce * (q - 1_y) + l1 * q * (s - sum q s),  s = sign(q - p)
    lk_hybrid  EAGLE-3's: value = w KL(p | q) + (1 - w) (1 - a),
               w = exp(-kl_decay a),  a = 1 - sum |q - p| / 2

Shapes: N slots, E hidden dim, V vocabulary, F rank of the Markov head, R slots of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longtrain.kernels.draft_loss import DraftPairs, draft_passes, teacher_of
from longtrain.losses.blocks import kernel_rows_of, operands, plain, scaled


class SlotLoss(NamedTuple):
    """The loss of drafted tokens.

    Args:
        total: weighted sum, with a gradient, nats; fp32 (fp64 in fp64).
        accept_N: share of the draft's samples that the target accepts, 1 - |q - p|_1 / 2; no gradient.
        hit_N: bool, the draft's most likely token is the target's; no gradient.
    """

    total: Tensor
    accept_N: Tensor
    hit_N: Tensor


class Weighing(NamedTuple):
    """What a slot's loss is made of.

    Args:
        objective: ce_l1 or lk_hybrid.
        ce: for ce_l1 the factor of the cross-entropy to the data.
        l1: for ce_l1 the factor of the L1 distance to the target's distribution.
        kl_decay: for lk_hybrid how fast the weight of the KL divergence falls with the accepted share.
    """

    objective: str = "ce_l1"
    ce: float = 0.1
    l1: float = 0.9
    kl_decay: float = 3.0


class Learned(NamedTuple):
    """What the slots learn.

    Args:
        hidden_NE: the target's input of its head for the same token.
        head_VE: its head, which the draft shares.
        labels_N: the token of the data.
        weights_N: weight of each slot.
    """

    hidden_NE: Tensor
    head_VE: Tensor
    labels_N: Tensor
    weights_N: Tensor


def slot_loss(
    hidden_NE: Tensor,
    before_NF: Tensor | None,
    markov_VF: Tensor | None,
    learned: Learned,
    weighing: Weighing,
    *,
    block_rows: int = 0,
) -> SlotLoss:
    """Weighted sum of the slots' losses; the logits of one block of slots exist at a time.

    Gradients for the draft's states, the Markov embeddings and the Markov matrix are computed in the forward;
    the matrix' is summed in fp32 (fp64 in fp64).

    Args:
        hidden_NE: the draft's input of the head.
        before_NF: Markov embedding of the token before each slot's; None: no correction.
        markov_VF: the matrix W2; None: no correction.
        learned: what to learn; no gradient flows into it.
        weighing: the objective and its factors.
        block_rows: slots whose logits exist at once; 0: as many as fit the budget.

    Source: DSpark eq. 9-11; the authors' code, whose L1 distance has no half.
    """
    hidden_NE, head_VE = operands(hidden_NE, learned.head_VE.detach())
    teacher_NE = learned.hidden_NE.detach().to(hidden_NE.dtype)
    if before_NF is not None and markov_VF is not None:
        before_NF = before_NF.to(hidden_NE.dtype)
    rows = block_rows or kernel_rows_of(head_VE, 2 * len(head_VE), len(hidden_NE))
    settings = (weighing, rows)
    labels = (learned.labels_N, learned.weights_N)
    return SlotLoss(*_SlotLoss.apply(hidden_NE, before_NF, markov_VF, teacher_NE, head_VE, *labels, settings))


class _SlotLoss(torch.autograd.Function):
    """Computes gradients in the forward, block by block; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        before_NF: Tensor | None,
        markov_VF: Tensor | None,
        teacher_NE: Tensor,
        head_VE: Tensor,
        labels_N: Tensor,
        weights_N: Tensor,
        settings: tuple[Weighing, int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `slot_loss`."""
        weighing, rows = settings
        wide = torch.promote_types(hidden_NE.dtype, torch.float32)
        authors = weighing.objective == "ce_l1"
        # of the kernel's loss; the L1 distance is twice the refused share
        scale = weighing.ce + 2 * weighing.l1 if authors else 1.0
        label_1N, weight_1N = labels_N[None], (weights_N.to(wide) * scale)[None]
        hit_1N = torch.empty_like(label_1N, dtype=torch.bool)
        value_1N, accept_1N = torch.empty_like(weight_1N), torch.empty_like(weight_1N)
        pairs = (torch.zeros_like(label_1N), weight_1N, value_1N, hit_1N, label_1N, accept_1N)
        w2_VF = None if markov_VF is None else markov_VF.to(hidden_NE.dtype)
        need = any(ctx.needs_input_grad[:3])
        grad_NE = torch.empty_like(hidden_NE) if need else None
        grad_NF = torch.empty_like(before_NF) if need and before_NF is not None else None
        grad_VF = torch.zeros_like(markov_VF, dtype=wide) if need and markov_VF is not None else None
        with plain(hidden_NE):
            for a in range(0, len(labels_N), rows):
                part = slice(a, a + rows)
                teacher = teacher_of(teacher_NE[part] @ head_VE.t(), None)
                z_RV = hidden_NE[part] @ head_VE.t()
                if before_NF is not None and w2_VF is not None:
                    z_RV.addmm_(before_NF[part], w2_VF.t())
                draft_passes(
                    z_RV[None],
                    teacher,
                    None,
                    DraftPairs(*(one_1N[:, part] for one_1N in pairs)),
                    objective="ce_tv" if authors else weighing.objective,
                    gradient=need,
                    ce_share=weighing.ce / scale,
                    kl_decay=weighing.kl_decay,
                )
                # the logits are their gradient now
                if grad_NE is not None:
                    grad_NE[part] = z_RV @ head_VE
                if grad_NF is not None and grad_VF is not None and before_NF is not None:
                    assert w2_VF is not None
                    grad_NF[part] = z_RV @ w2_VF
                    grad_VF += z_RV.t() @ before_NF[part]
        ctx.save_for_backward(grad_NE, grad_NF, grad_VF)
        ctx.markov_dtype = None if markov_VF is None else markov_VF.dtype
        accept_N, hit_N = accept_1N[0], hit_1N[0]
        ctx.mark_non_differentiable(accept_N, hit_N)
        return value_1N.sum(), accept_N, hit_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming one."""
        hidden, before, markov = (scaled(grad, grads[0]) for grad in ctx.saved_tensors)
        markov = None if markov is None else markov.to(ctx.markov_dtype)
        return hidden, before, markov, None, None, None, None, None
