"""Attention over packed segments: each segment's queries see its own keys, causally, aligned at their ends.

Formula, query r of a segment with n_q queries and n_k keys: softmax over c of scale * q_r·k_c, with
max(0, e - window) <= c <= e and e = n_k - n_q + r.

Shapes: T queries, S keys, H query heads, G KV heads (H a multiple of G), D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longtrain.errors import DataError, refusal
from longtrain.kernels.attention.flash import flash_lse, flash_segments, flash_serves
from longtrain.kernels.attention.segments import Segment, cut, segments, spread

_SCORES = 1 << 26
"""Scores that `packed_lse` holds at once."""
_ROWS = 128
"""Queries of one masked block: a block reads only keys visible to it, and its mask stays small."""


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
    """Segmented causal attention, bottom-right aligned; differentiable in q, k and v.

    bf16 and fp16 on a GPU use flash attention; everything else uses masked blocks in the tensors' own dtype.

    Args:
        q_THD: queries, after RoPE.
        k_SGD: keys, after RoPE.
        v_SGD: values.
        q_bounds: segment bounds in q, on the host: segment i is `q_bounds[i]:q_bounds[i + 1]`. Tokens outside
            all segments give 0.
        k_bounds: segment bounds in k and v, as many as `q_bounds`.
        scale: softmax scale, usually D ** -0.5.
        window: number of previous keys that a token sees besides its own (512 means 513 keys); None: all.

    Returns:
        out_THD in q's dtype. Tokens that see nothing (the first n_q - n_k of a segment with n_k < n_q) give 0
        and pass no gradient.

    Raises:
        DataError: bounds that decrease, leave the tensors or differ in number; a negative window; query heads
            that are no multiple of the KV heads.
    """
    if q_THD.shape[1] % k_SGD.shape[1] or k_SGD.shape != v_SGD.shape or q_THD.shape[2] != k_SGD.shape[2]:
        raise refusal(
            DataError,
            f"attention of q {tuple(q_THD.shape)} over k {tuple(k_SGD.shape)} and v {tuple(v_SGD.shape)}",
            "one head size, and query heads a multiple of KV heads",
        )
    if window is not None and window < 0:
        raise refusal(DataError, f"attention window={window}", "0 (a token sees itself) or more, or None")
    parts = segments(q_bounds, k_bounds, len(q_THD), len(k_SGD))
    if not parts:
        return torch.zeros_like(q_THD)
    if flash_serves(q_THD, k_SGD):
        return flash_segments(q_THD, k_SGD, v_SGD, parts, scale=scale, window=window)
    return _blocks(q_THD, k_SGD, v_SGD, parts, scale=scale, window=window)


def packed_lse(
    q_THD: Tensor,
    k_SGD: Tensor,
    q_bounds: Sequence[int],
    k_bounds: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Log of the sum of exponentials of each token's scores in `packed_attention`, without gradients.

    Args:
        q_THD: queries, after RoPE.
        k_SGD: keys, after RoPE.
        q_bounds: segment bounds in q, on the host.
        k_bounds: segment bounds in k.
        scale: softmax scale.
        window: number of previous keys that a token sees besides its own; None: all.

    Returns:
        lse_TH (natural) in fp32 (fp64 for fp64); -inf for tokens that see nothing.
    """
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    T, H, _ = q_THD.shape
    G = k_SGD.shape[1]
    parts = segments(q_bounds, k_bounds, T, len(k_SGD))
    if parts and flash_serves(q_THD, k_SGD):
        return flash_lse(q_THD, k_SGD, parts, scale=scale, window=window)
    lse_TH = q_THD.new_full((T, H), -torch.inf, dtype=wide)
    for part in parts:
        rows, keys = part.q_stop - part.q_start, part.k_stop - part.k_start
        block = max(1, _SCORES // (H * keys))
        for start in range(0, rows, block):
            stop = min(start + block, rows)
            last_R = torch.arange(start, stop, device=q_THD.device)[:, None] + keys - rows
            low = 0 if window is None else max(0, start + keys - rows - window)
            high = max(low, stop + keys - rows)
            key_C = torch.arange(low, high, device=q_THD.device)
            seen_RC = key_C <= last_R
            if window is not None:
                seen_RC &= key_C >= last_R - window
            at = slice(part.q_start + start, part.q_start + stop)
            q_GgRD = q_THD[at].detach().unflatten(1, (G, H // G)).permute(1, 2, 0, 3)
            k_GDC = k_SGD[part.k_start + low : part.k_start + high].detach().permute(1, 2, 0)
            scores_GgRC = (q_GgRD @ k_GDC[:, None]).to(wide) * scale
            lse_GgR = scores_GgRC.masked_fill(~seen_RC, -torch.inf).logsumexp(-1)
            lse_TH[at] = lse_GgR.flatten(0, 1).T
    return lse_TH


def _blocks(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, parts: list[Segment], *, scale: float, window: int | None
) -> Tensor:
    """Masked attention in blocks of queries, each over the keys that any query of the block sees."""
    pieces = []
    q_spans = cut(q_THD, [(p.q_start, p.q_stop) for p in parts])
    k_spans = cut(k_SGD, [(p.k_start, p.k_stop) for p in parts])
    v_spans = cut(v_SGD, [(p.k_start, p.k_stop) for p in parts])
    for q, k, v in zip(q_spans, k_spans, v_spans, strict=True):
        offset = len(k) - len(q)
        q_blocks = q.split(_ROWS)
        for index, block in enumerate(q_blocks):
            first = offset + index * _ROWS  # the last key that the block's first query sees
            low = 0 if window is None else max(0, first - window)
            high = first + len(block)
            pieces.append(_masked(block, k[low:high], v[low:high], first - low, scale=scale, window=window))
    return spread(torch.cat(pieces), [(p.q_start, p.q_stop) for p in parts], len(q_THD))


def _masked(
    q_RHD: Tensor, k_CGD: Tensor, v_CGD: Tensor, first: int, *, scale: float, window: int | None
) -> Tensor:
    """Queries r over keys c <= first + r; query heads of a KV head are packed, so K is not repeated."""
    R, H, D = q_RHD.shape
    C, G, _ = k_CGD.shape
    last_R = torch.arange(first, first + R, device=q_RHD.device)[:, None]
    key_C = torch.arange(C, device=q_RHD.device)
    visible_RC = key_C <= last_R
    if window is not None:
        visible_RC &= key_C >= last_R - window
    q_GgRD = q_RHD.view(R, G, H // G, D).permute(1, 2, 0, 3).reshape(1, G, H // G * R, D)
    out = scaled_dot_product_attention(
        q_GgRD,
        k_CGD.transpose(0, 1)[None],
        v_CGD.transpose(0, 1)[None],
        attn_mask=visible_RC.repeat(H // G, 1)[None, None],
        scale=scale,
    )
    return out.view(G, H // G, R, D).permute(2, 0, 1, 3).reshape(R, H, D)
