"""What attention kernels compute, written plainly in fp32 (fp64 stays fp64).

Shapes: T queries, S keys, N tree nodes, H query heads, G KV heads, D head dim, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longtrain.kernels.tree_attention.reference import masked_attention


def packed_attention(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    q_bounds: Sequence[int],
    k_bounds: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Row r of a segment of n_q queries and n_k keys sees keys c <= e = n_k - n_q + r (and >= e - window).

    One dense [T, S] mask over the whole row; the twin of `kernels.attention.packed.packed_attention`.
    """
    T, S = q_THD.shape[0], k_SGD.shape[0]
    visible_TS = torch.zeros(T, S, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(q_bounds[:-1], q_bounds[1:], k_bounds[:-1], k_bounds[1:], strict=True):
        for row in range(q0, q1):
            last = k1 - q1 + row
            first = k0 if window is None else max(k0, last - window)
            visible_TS[row, first : max(last + 1, first)] = True
    out, _ = masked_attention(
        q_THD.transpose(0, 1)[None],
        k_SGD.transpose(0, 1)[None],
        v_SGD.transpose(0, 1)[None],
        visible_TS.to(q_THD.device)[None],
        scale=scale,
    )
    return out[0].transpose(0, 1)


def tree_attention(
    q_BHND: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    len_B: Tensor,
    visible_BNN: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """N tree nodes over a prefix of `len_B[b]` keys and, right after it, their own N keys under a mask."""
    N, S = q_BHND.shape[2], k_BGSD.shape[2]
    visible_BNS = torch.zeros(len(len_B), N, S, dtype=torch.bool, device=q_BHND.device)
    for b, n in enumerate(len_B.tolist()):
        visible_BNS[b, :, :n] = True
        visible_BNS[b, :, n : n + N] = visible_BNN[b]
    return masked_attention(q_BHND, k_BGSD, v_BGSD, visible_BNS, scale=scale)


def lse_merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """Out = (o1 e^l1 + o2 e^l2) / (e^l1 + e^l2), l = log(e^l1 + e^l2); -inf on both sides gives 0 and -inf.

    Source: LongSpec §3.3 (hybrid tree attention), with m = max(l1, l2) taken out.
    """
    top = torch.maximum(lse_1, lse_2)
    safe = top.masked_fill(top == -torch.inf, 0)
    w_1, w_2 = torch.exp(lse_1 - safe), torch.exp(lse_2 - safe)
    total = w_1 + w_2
    out = (out_1 * w_1[..., None] + out_2 * w_2[..., None]) / total.clamp_min(1e-30)[..., None]
    return out, safe + torch.log(total)
