"""KL divergence between two importance distributions over a prompt's tokens.

Shapes: T tokens, H heads, P prompts of a packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longtrain.losses.blocks import scaled

_LEAST = 1e-12
"""Predicted importance counts as at least this share of its prompt."""


def importance_kl(pred_HT: Tensor, true_HT: Tensor, prompt_T: Tensor, prompts: int) -> Tensor:
    """KL from the true importance of a prompt's tokens to the predicted one, averaged over heads.

    Both are normalised over each prompt. Terms of true importance 0 are dropped, and the prediction is
    clamped to at least 1e-12 (without a gradient there). All in fp32 (fp64 stays fp64); the gradient is
    computed in the forward.

    Args:
        pred_HT: predicted importance of each token, 0 or more, of any scale.
        true_HT: the true one, as above; no gradient flows into it.
        prompt_T: int64, the prompt that each token belongs to; `prompts` for tokens of none.
        prompts: P.

    Returns:
        scalar sum over prompts, nats.

    Source: LookaheadKV §3.2, Eq. 4 (ListNet with the identity in place of exp).
    """
    return _ImportanceKL.apply(pred_HT, true_HT.detach(), prompt_T, prompts)


class _ImportanceKL(torch.autograd.Function):
    """With q = s / Z and the true p = r / Z_t: dKL/ds_j = (sum of p over unclamped q) / Z - p_j / s_j."""

    @staticmethod
    def forward(ctx: Any, pred_HT: Tensor, true_HT: Tensor, prompt_T: Tensor, prompts: int) -> Tensor:
        wide = torch.promote_types(pred_HT.dtype, torch.float32)
        inside_T = prompt_T < prompts
        pred_HT, true_HT = (x_HT.to(wide).where(inside_T, 0.0) for x_HT in (pred_HT, true_HT))

        def spread(x_HT: Tensor) -> Tensor:
            """Each prompt's sum, repeated at each of its tokens."""
            if prompts == 1:
                return x_HT.sum(-1, keepdim=True)
            sum_HP = x_HT.new_zeros(x_HT.shape[0], prompts + 1).index_add_(1, prompt_T, x_HT)
            return sum_HP[:, prompt_T]

        total_HT = spread(pred_HT)
        true_HT = (true_HT / spread(true_HT)).nan_to_num_(0.0, 0.0, 0.0)
        share_HT = pred_HT / total_HT
        counts_HT = (true_HT > 0) & (share_HT > _LEAST)
        log_ratio_HT = true_HT.log() - share_HT.nan_to_num(0.0, 0.0, 0.0).clamp_min(_LEAST).log()
        kl = torch.where(true_HT > 0, true_HT * log_ratio_HT, 0.0).sum() / len(pred_HT)
        if ctx.needs_input_grad[0]:
            used_HT = true_HT * counts_HT
            grad_HT = spread(used_HT) / total_HT - used_HT / pred_HT.where(counts_HT, pred_HT.new_ones(()))
            ctx.save_for_backward(torch.where(inside_T & (total_HT > 0), grad_HT, 0.0) / len(pred_HT))
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return scaled(ctx.saved_tensors[0], grads[0]), None, None, None
