"""Attention to a few keys of each query's own, merged with attention computed before; and its gradient.

Formulas, for a query head h of KV head g and its own keys m: s_m = scale * q·k_m, -inf if the query does not
see it; lse' = log(exp(lse) + sum_m exp(s_m)); out' = exp(lse - lse') out + sum_m exp(s_m - lse') v_m. With
w_m = exp(s_m - lse') and delta = rowsum(dO * out'): ds_m = w_m (dO·v_m - delta) scale, dq = sum_m ds_m k_m,
and over the query heads of a KV head dk_m = sum ds_m q, dv_m = sum w_m dO.

Triton if `kernels.devices` allows it, else `reference` in plain torch. Sums in fp32 or wider.

Shapes: M own keys of a query, T queries, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longtrain.kernels.devices import kernels_serve
from longtrain.kernels.own_keys import reference

_MOST_DIM = 256
"""Largest head dim of the Triton kernels."""


class OwnKeys(NamedTuple):
    """Keys and values of each query's own.

    Args:
        k_MTGD: keys, after RoPE.
        v_MTGD: values.
        seen_MT: bool mask of the queries that see them; None: all do.
    """

    k_MTGD: Tensor
    v_MTGD: Tensor
    seen_MT: Tensor | None


def merge(
    q_THD: Tensor, out_THD: Tensor, lse_TH: Tensor, own: OwnKeys, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Add own keys to attention computed before.

    Args:
        q_THD: queries.
        out_THD: attention output over the other keys.
        lse_TH: log-sum-exp of the scores of the other keys, finite.
        own: at least one key.
        scale: softmax scale.

    Returns:
        out_THD in q's dtype; lse_TH in fp32 (fp64 for fp64), contiguous.
    """
    if _kernels_serve(q_THD, own.k_MTGD):
        from longtrain.kernels.own_keys import launch

        return launch.merge(q_THD, out_THD, lse_TH, own, scale=scale)
    return reference.merge(q_THD, out_THD, lse_TH, own, scale=scale)


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
    """Gradients of the own keys and values, and the queries' gradient with the own keys' part added.

    Args:
        grad_THD: gradient of the merged output.
        q_THD: queries.
        out_THD: the merged output.
        lse_TH: the merged log-sum-exp.
        own: as given to `merge`.
        dq_THD: the gradient of the queries through all other keys.
        scale: softmax scale.

    Returns:
        dq_THD of both, in q's dtype; dk_MTGD; dv_MTGD.
    """
    if _kernels_serve(q_THD, own.k_MTGD):
        from longtrain.kernels.own_keys import launch

        return launch.merge_backward(grad_THD, q_THD, out_THD, lse_TH, own, dq_THD, scale=scale)
    return reference.merge_backward(grad_THD, q_THD, out_THD, lse_TH, own, dq_THD, scale=scale)


def _kernels_serve(q_THD: Tensor, k_MTGD: Tensor) -> bool:
    fits = q_THD.dtype == k_MTGD.dtype and q_THD.shape[-1] <= _MOST_DIM
    with torch.no_grad():
        return fits and kernels_serve(q_THD) and kernels_serve(k_MTGD)
