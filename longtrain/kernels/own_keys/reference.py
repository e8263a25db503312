"""The reference implementation of `kernels.own_keys` in plain torch.

Shapes: as there; g = H / G query heads of a KV head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longtrain.kernels.own_keys import OwnKeys


def merge(
    q_THD: Tensor, out_THD: Tensor, lse_TH: Tensor, own: OwnKeys, *, scale: float
) -> tuple[Tensor, Tensor]:
    """See `kernels.own_keys.merge`."""
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    lse_TH, score_MTH = lse_TH.to(wide), _scores(q_THD.to(wide), own, scale)
    merged_TH = torch.cat((lse_TH[None], score_MTH)).logsumexp(0)
    out_THD = out_THD.to(wide) * (lse_TH - merged_TH).exp()[..., None]
    for score_TH, v_TGD in zip(score_MTH, own.v_MTGD, strict=True):
        out_THD += _to_heads((score_TH - merged_TH).exp()[..., None], v_TGD)
    return out_THD.to(q_THD.dtype), merged_TH


def merge_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    own: OwnKeys,
    dq_THD: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.own_keys.merge_backward`."""
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    grad, q, dq = grad_THD.to(wide), q_THD.to(wide), dq_THD.to(wide)
    delta_TH = (grad * out_THD.to(wide)).sum(-1)
    dk, dv = [], []
    scores_MTH = _scores(q, own, scale)
    for score_TH, k_TGD, v_TGD in zip(scores_MTH, own.k_MTGD, own.v_MTGD, strict=True):
        weight_TH = (score_TH - lse_TH).exp()
        d_score_TH = weight_TH * (_dots(grad, v_TGD) - delta_TH) * scale
        dq = dq + _to_heads(d_score_TH[..., None], k_TGD)
        dk.append(_from_heads(d_score_TH, q, k_TGD))
        dv.append(_from_heads(weight_TH, grad, v_TGD))
    return dq.to(q_THD.dtype), torch.stack(dk), torch.stack(dv)


def _scores(q_THD: Tensor, own: OwnKeys, scale: float) -> Tensor:
    """Scaled q·k of each own key, [M, T, H]; -inf where a query does not see it."""
    score_MTH = torch.stack([_dots(q_THD, k_TGD) * scale for k_TGD in own.k_MTGD])
    return score_MTH if own.seen_MT is None else score_MTH.masked_fill(~own.seen_MT[..., None], -torch.inf)


def _dots(x_THD: Tensor, y_TGD: Tensor) -> Tensor:
    """The product of each query head's vector with its KV head's, [T, H], in x's dtype."""
    G = y_TGD.shape[1]
    return (x_THD.unflatten(1, (G, -1)) * y_TGD[:, :, None].to(x_THD.dtype)).sum(-1).flatten(1)


def _to_heads(weight_TH1: Tensor, y_TGD: Tensor) -> Tensor:
    """The weighted y at each query head, [T, H, D], in the weight's dtype."""
    G = y_TGD.shape[1]
    return (weight_TH1.unflatten(1, (G, -1)) * y_TGD[:, :, None].to(weight_TH1.dtype)).flatten(1, 2)


def _from_heads(weight_TH: Tensor, x_THD: Tensor, like_TGD: Tensor) -> Tensor:
    """The sum of weight * x over the query heads of each KV head, [T, G, D], in the dtype of `like_TGD`."""
    G = like_TGD.shape[1]
    return (weight_TH[..., None] * x_THD).unflatten(1, (G, -1)).sum(2).to(like_TGD.dtype)
