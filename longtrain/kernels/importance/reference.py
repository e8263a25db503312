"""Reference implementation of `kernels.importance` with full matrices: the specification and the CPU path.

Products, exponentials and sums are fp32 (fp64 stays fp64), under autocast too.

Shapes: see `kernels.importance`; X prefix and own keys, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from longtrain.kernels.importance.spans import Span


def suffix_lse(
    q_NHD: Tensor, own_k_NGD: Tensor, k_BTGD: Tensor, spans: Sequence[Span], *, scale: float
) -> Tensor:
    """Reference for `kernels.importance.suffix_lse`."""
    with torch.autocast(q_NHD.device.type, enabled=False):
        parts = [torch.logsumexp(_logits(q_NHD, own_k_NGD, k_BTGD, span, scale), -1) for span in spans]
        return torch.cat(parts, 1).T


def importance(
    q_NHD: Tensor,
    lse_NH: Tensor,
    k_BTGD: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    reduce: Literal["mean", "max"] = "mean",
) -> Tensor:
    """Reference for `kernels.importance.importance`."""
    with torch.autocast(q_NHD.device.type, enabled=False):
        parts = []
        for span in spans:
            rows, keys = slice(*span.rows), slice(*span.keys)
            logit_HNT = _prefix(q_NHD[rows], k_BTGD[span.seq, keys], scale)
            p_HNT = torch.exp(logit_HNT - lse_NH[rows].T[..., None])
            parts.append(p_HNT.mean(1) if reduce == "mean" else p_HNT.amax(1))
        return _placed(parts, q_NHD, k_BTGD, spans)


def own_importance(
    q_NHD: Tensor, own_k_NGD: Tensor, lse_NH: Tensor, spans: Sequence[Span], *, scale: float
) -> Tensor:
    """Reference for `kernels.importance.own_importance`."""
    with torch.autocast(q_NHD.device.type, enabled=False):
        parts = []
        for span in spans:
            rows = slice(*span.rows)
            logit_HNN = _own(q_NHD[rows], own_k_NGD[rows], scale)
            parts.append(torch.exp(logit_HNN - lse_NH[rows].T[..., None]).mean(1))
        return torch.cat(parts, 1).T


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
    """Reference for `kernels.importance.suffix_attention`; the gradient is autograd's."""
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    with torch.autocast(q_NHD.device.type, enabled=False):
        outs, parts = [], []
        for span in spans:
            rows, keys = slice(*span.rows), slice(*span.keys)
            p_HNX = torch.softmax(_logits(q_NHD, own_k_NGD, k_BTGD, span, scale), -1)
            v_XGD = torch.cat((v_BTGD[span.seq, keys].to(wide), own_v_NGD[rows].to(wide)))
            v_XHD = v_XGD.repeat_interleave(q_NHD.shape[1] // k_BTGD.shape[2], 1)
            outs.append(torch.einsum("hnx,xhd->nhd", p_HNX, v_XHD))
            parts.append(p_HNX[..., : span.keys[1] - span.keys[0]].mean(1))
        return torch.cat(outs).to(q_NHD.dtype), _placed(parts, q_NHD, k_BTGD, spans)


def _placed(parts: list[Tensor], q_NHD: Tensor, k_BTGD: Tensor, spans: Sequence[Span]) -> Tensor:
    """The spans' scores [H, keys] at their keys of s_BHT, zeros elsewhere."""
    s_BHT = parts[0].new_zeros(len(k_BTGD), q_NHD.shape[1], k_BTGD.shape[1])
    for span, part in zip(spans, parts, strict=True):
        s_BHT[span.seq, :, slice(*span.keys)] = part
    return s_BHT


def _prefix(q_NHD: Tensor, k_TGD: Tensor, scale: float) -> Tensor:
    """Scaled products [H, N, T] in fp32 or wider."""
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    N, H, D = q_NHD.shape
    G = k_TGD.shape[1]
    q_GgND = q_NHD.reshape(N, G, H // G, D).permute(1, 2, 0, 3).to(wide) * scale
    return (q_GgND @ k_TGD.to(wide).permute(1, 2, 0)[:, None]).reshape(H, N, -1)


def _own(q_NHD: Tensor, own_k_NGD: Tensor, scale: float) -> Tensor:
    """Scaled products [H, N, N] with the queries' own keys under a causal mask."""
    n = len(q_NHD)
    later = torch.ones(n, n, dtype=torch.bool, device=q_NHD.device).triu(1)
    return _prefix(q_NHD, own_k_NGD, scale).masked_fill(later, -torch.inf)


def _logits(q_NHD: Tensor, own_k_NGD: Tensor, k_BTGD: Tensor, span: Span, scale: float) -> Tensor:
    """Scaled products [H, N, prefix + N], own keys under a causal mask."""
    rows, keys = slice(*span.rows), slice(*span.keys)
    q = q_NHD[rows]
    return torch.cat((_prefix(q, k_BTGD[span.seq, keys], scale), _own(q, own_k_NGD[rows], scale)), -1)
