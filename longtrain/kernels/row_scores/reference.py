"""Scores of rows in plain torch. Shapes as in `kernels.row_scores`."""

from __future__ import annotations

import torch
from torch import Tensor


def row_scores(q_BXHD: Tensor, k_BSCD: Tensor, n_B: Tensor, groups: int, scale: float) -> Tensor:
    """See `kernels.row_scores.row_scores`. Products run in the tensors' dtype, the rest in fp32 or wider."""
    (B, X, H, D), (S, C) = q_BXHD.shape, k_BSCD.shape[1:3]
    keys, share = C // groups, X // C
    q = q_BXHD.view(B, keys, share, groups, H, D).transpose(2, 3).reshape(B, C, share * H, D)
    score = q @ k_BSCD.permute(0, 2, 3, 1)
    score = score.to(torch.promote_types(score.dtype, torch.float32)) * scale
    seen_BS = torch.arange(S, device=n_B.device) < n_B[:, None]
    score = score.masked_fill(~seen_BS[:, None, None], -torch.inf)
    weight = score - score.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
    best = weight.view(B, keys, groups, share, H, S).amax(-2)
    return best.transpose(2, 3).reshape(B, X, S)
