"""Attention over packed segments where each token also sees some keys of its own, in one softmax.

Formula, query r of a segment with n_q queries and n_k keys: softmax over scale * q_r·k_c for the keys c that
are visible in `packed`, and over scale * q_r·o_m[r] for each of its own keys m. A draft that is trained over
several steps of its own (EAGLE-3's training-time test) reads the first step's keys as segments, and the keys
of its later steps token by token.

Shapes: T queries, S keys, H query heads, G KV heads (H a multiple of G), D head dim, R queries of a block, C
keys that a block sees, M own keys of a token, g = H / G.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.attention.flash import flash_serves
from longtrain.kernels.attention.own_keys_flash import OwnKeysFlash
from longtrain.kernels.attention.segments import Segment, segments

_ROWS = 128
"""Queries of one masked block."""


class OwnKey(NamedTuple):
    """One further key and value for each token.

    Args:
        k_TGD: its key, after RoPE.
        v_TGD: its value.
        visible_T: bool mask of the tokens that see it; None: all.
    """

    k_TGD: Tensor
    v_TGD: Tensor
    visible_T: Tensor | None = None


def own_keys_attention(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    q_bounds: Sequence[int],
    k_bounds: Sequence[int],
    own: Sequence[OwnKey] = (),
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Segmented causal attention, bottom-right aligned, with own keys of each token; differentiable in all.

    bf16 and fp16 on a GPU use flash attention over the segments, merged with the own keys, and flash's
    backward with the lse of both; everything else uses masked blocks in the tensors' own dtype.

    Args:
        q_THD: queries, after RoPE.
        k_SGD: keys of the segments, after RoPE.
        v_SGD: their values.
        q_bounds: segment bounds in q, on the host; every token is in a segment.
        k_bounds: segment bounds in k and v, as many; a segment has at least as many keys as queries.
        own: further keys of each token.
        scale: softmax scale.
        window: number of previous keys of its segment that a token sees; None: all.

    Returns:
        out_THD in q's dtype.

    Raises:
        DataError: bounds that decrease, leave the tensors, differ in number or leave a token without keys.
    """
    parts = segments(q_bounds, k_bounds, len(q_THD), len(k_SGD))
    edges = [0, *(part.q_stop for part in parts)]
    if [part.q_start for part in parts] != edges[:-1] or edges[-1] != len(q_THD):
        raise refusal(
            DataError,
            f"attention with own keys over q_bounds {tuple(q_bounds)[:8]} of {len(q_THD)} tokens",
            "bounds that cover every token, each with a key of its segment",
        )
    if flash_serves(q_THD, k_SGD):
        flat = [part for one in own for part in one[:2]]
        visible = tuple(one.visible_T for one in own)
        return OwnKeysFlash.apply(q_THD, k_SGD, v_SGD, parts, scale, window, visible, *flat)
    blocks = [
        _masked(q_THD, k_SGD, v_SGD, part, low, high, own, scale=scale, window=window)
        for part in parts
        for low, high in pairwise([*range(part.q_start, part.q_stop, _ROWS), part.q_stop])
    ]
    return torch.cat(blocks) if blocks else torch.zeros_like(q_THD)


def _masked(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    part: Segment,
    low: int,
    high: int,
    own: Sequence[OwnKey],
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Queries low..high of a segment: one softmax over the keys visible to them and their own."""
    shift = part.k_stop - part.q_stop  # index of a query's own key minus that of the query
    first = part.k_start if window is None else max(part.k_start, low + shift - window)
    k_CGD, v_CGD = k_SGD[first : high + shift], v_SGD[first : high + shift]
    H, G = q_THD.shape[1], k_SGD.shape[1]
    q_RGgD = q_THD[low:high].unflatten(1, (G, H // G))
    row_R1 = torch.arange(low + shift, high + shift, device=q_THD.device)[:, None]
    key_C = torch.arange(first, high + shift, device=q_THD.device)
    seen_RC = key_C <= row_R1
    if window is not None:
        seen_RC &= key_C >= row_R1 - window
    score_RGgC = torch.einsum("rghd,cgd->rghc", q_RGgD, k_CGD) * scale
    scores = [score_RGgC.masked_fill(~seen_RC[:, None, None], -torch.inf)]
    for one in own:
        score_RGg1 = torch.einsum("rghd,rgd->rgh", q_RGgD, one.k_TGD[low:high])[..., None] * scale
        if one.visible_T is not None:
            score_RGg1 = score_RGg1.masked_fill(~one.visible_T[low:high, None, None, None], -torch.inf)
        scores.append(score_RGg1)
    weight, *mine = torch.cat(scores, -1).softmax(-1).split([len(key_C), *[1] * len(own)], -1)
    out_RGgD = torch.einsum("rghc,cgd->rghd", weight, v_CGD)
    for weight_RGg1, one in zip(mine, own, strict=True):
        out_RGgD = out_RGgD + weight_RGg1 * one.v_TGD[low:high, :, None]
    return out_RGgD.flatten(1, 2)
