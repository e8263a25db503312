"""Importance of prompt tokens: the attention that a few observing rows give them, without rows x keys matrices.

Formulas, for an observing row i of a span whose prefix keys are j and whose own keys are the rows c <= i:
lse_i = log(sum_j exp(scale q_i·k_j) + sum_c exp(scale q_i·own_k_c)), p_ij = exp(scale q_i·k_j - lse_i),
s_j = mean_i p_ij.
Shapes: N observing rows of all spans, H query heads, G KV heads (H a multiple of G), D head dim, B sequences,
T key slots of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """The observing rows of one prompt and the keys that all of them see; numbers on the host.

    Args:
        rows: start and stop in the N rows (of q and of the rows' own K and V).
        seq: sequence in the first dim of the prefix keys.
        keys: start and stop of the prefix in that sequence's T slots.
    """

    rows: tuple[int, int]
    seq: int
    keys: tuple[int, int]


def suffix_lse(
    q_NHD: Tensor, own_k_NGD: Tensor, k_BTGD: Tensor, spans: Sequence[Span], *, scale: float
) -> Tensor:
    """Natural-log sum of exponentials of each row over prefix and own causal keys: lse_NH in fp32 (or wider)."""
    return torch.cat(
        [torch.logsumexp(_logits(q_NHD, own_k_NGD, k_BTGD, span, scale), -1) for span in spans], 1
    ).T


def importance(
    q_NHD: Tensor,
    lse_NH: Tensor,
    k_BTGD: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    reduce: Literal["mean", "max"] = "mean",
) -> Tensor:
    """Column mean (or maximum) of the rows' attention on the prefix keys: s_BHT in fp32, 0 elsewhere."""
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    s_BHT = torch.zeros(len(k_BTGD), q_NHD.shape[1], k_BTGD.shape[1], dtype=wide, device=q_NHD.device)
    for span in spans:
        rows, keys = slice(*span.rows), slice(*span.keys)
        p_HNT = torch.exp(_prefix(q_NHD[rows], k_BTGD[span.seq, keys], scale) - lse_NH[rows].T[..., None])
        s_BHT[span.seq, :, keys] = p_HNT.mean(1) if reduce == "mean" else p_HNT.amax(1)
    return s_BHT


def suffix_attention(
    q_NHD: Tensor,
    own_k_NGD: Tensor,
    own_v_NGD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of the rows over prefix and own causal keys, and the importance they give the prefix.

    Differentiable in q, own_k and own_v; the prefix is constant.

    Returns: out_NHD in q's dtype and s_BHT, fp32 (see `importance`).
    """
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    outs, parts = [], []
    for span in spans:
        rows, keys = slice(*span.rows), slice(*span.keys)
        p_HNX = torch.softmax(_logits(q_NHD, own_k_NGD, k_BTGD, span, scale), -1)
        n = span.keys[1] - span.keys[0]
        v_XHD = torch.cat((v_BTGD[span.seq, keys], own_v_NGD[rows])).to(wide)
        v_XHD = v_XHD.repeat_interleave(q_NHD.shape[1] // k_BTGD.shape[2], 1)
        outs.append(torch.einsum("hnx,xhd->nhd", p_HNX, v_XHD))
        parts.append(p_HNX[..., :n].mean(1))
    s_BHT = torch.zeros(len(k_BTGD), q_NHD.shape[1], k_BTGD.shape[1], dtype=wide, device=q_NHD.device)
    for span, part in zip(spans, parts, strict=True):
        s_BHT[span.seq, :, slice(*span.keys)] = part
    return torch.cat(outs).to(q_NHD.dtype), s_BHT


def _prefix(q_NHD: Tensor, k_TGD: Tensor, scale: float) -> Tensor:
    """Scaled products [H, N, T] in fp32 or wider."""
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    N, H, D = q_NHD.shape
    G = k_TGD.shape[1]
    q_GgND = q_NHD.view(N, G, H // G, D).permute(1, 2, 0, 3).to(wide) * scale
    return (q_GgND @ k_TGD.to(wide).permute(1, 2, 0)[:, None]).reshape(H, N, -1)


def _logits(q_NHD: Tensor, own_k_NGD: Tensor, k_BTGD: Tensor, span: Span, scale: float) -> Tensor:
    """Scaled products [H, N, prefix + N], own keys under a causal mask."""
    rows = slice(*span.rows)
    q = q_NHD[rows]
    own = _prefix(q, own_k_NGD[rows], scale)
    n = len(q)
    later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    return torch.cat(
        (_prefix(q, k_BTGD[span.seq, slice(*span.keys)], scale), own.masked_fill(later, -torch.inf)), -1
    )
