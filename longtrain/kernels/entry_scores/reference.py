"""Reference implementation of `kernels.entry_scores` in plain torch. Shapes as there; R queries."""

from __future__ import annotations

import torch
from torch import Tensor


def entry_scores(q_BXHD: Tensor, k_BSCD: Tensor, n_B: Tensor, groups: int, scale: float) -> Tensor:
    """See `kernels.entry_scores.entry_scores`."""
    seen_BS = torch.arange(k_BSCD.shape[1], device=n_B.device) < n_B[:, None]
    q_BRHD, sets = q_BXHD.flatten(1, 2)[:, None], q_BXHD.shape[1] // groups
    return log_scores(q_BRHD, k_BSCD, seen_BS[:, None], sets=sets, groups=groups, scale=scale)[:, :, 0]


def log_scores(
    q_RHD: Tensor, k_SCD: Tensor, visible_RS: Tensor, *, sets: int, groups: int, scale: float
) -> Tensor:
    """Scores of KV entries for many queries, differentiable.

    Products run in the tensors' own dtype, the rest in fp32 or wider.

    Args:
        q_RHD: queries, [..., R, heads, D]; heads ordered by group of sets, then set, then head of the set.
        k_SCD: keys, [..., S, C, D], as in `entry_scores`.
        visible_RS: bool mask, [..., R, S], of the entries that each query may attend to.
        sets: groups of sets.
        groups: KV heads, each with a set in every group.
        scale: softmax scale.

    Returns: scores_XRS, [..., X, R, S]; -inf where not visible.

    Source: SpeContext (arXiv 2512.00722) §4.3 (MHA, GQA and MQA are one rule).
    """
    heads, keys = q_RHD.shape[-2] // sets, k_SCD.shape[-2] // groups
    q = q_RHD.unflatten(-2, (keys, sets // keys, groups, heads // groups))
    q = q.movedim(-6, -2).movedim(-5, -4)  # ... keys, groups, sets that share them, heads of each, R, D
    k = k_SCD.unflatten(-2, (keys, groups)).movedim(-4, -2)  # ... keys, groups, S, D
    score = (q.flatten(-4, -2) @ k.transpose(-1, -2)).unflatten(-2, q.shape[-4:-1])
    score = score.to(torch.promote_types(score.dtype, torch.float32)) * scale
    score = score.masked_fill(~visible_RS[..., None, None, None, None, :, :], -torch.inf)
    log_weight = score - score.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
    return log_weight.amax(-3).movedim(-3, -4).flatten(-5, -3)
