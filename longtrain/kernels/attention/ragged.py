"""Attention over prefixes that every query sees, of equal length or of one for each sequence and KV head.

Formula: out = softmax(scale q·K) V and its natural-log lse, over entries start_x .. start_x + n_x of flat K
and V for segment x = (sequence, KV head). On a GPU a segment is cut into pieces that flash attention
processes as sequences of their own, so that a long one uses the whole device; they are merged by lse.

Shapes: B batch, G KV heads, X = B * G segments, P pieces, J pieces of one segment, R packed rows (T new
tokens x H/G query heads), S keys, N flat keys of all segments, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from longtrain.kernels.attention.split import split_serves

PIECE = 1024
"""Keys of a piece."""


@dataclass(frozen=True)
class Segments:
    """Ranges of the segments; computed once by `segments_of`.

    Args:
        start_X: index of the first flat entry, int64.
        count_X: number of entries, int64, at least 1.
        longest: most entries of a segment, on the host.
        bounds_P: bounds of the pieces in the flat entries, int32, P + 1 of them.
        owner_P: segment of each piece, int64.
        piece_XJ: pieces of each segment, int64, padded with P.
    """

    start_X: Tensor
    count_X: Tensor
    longest: int
    bounds_P: Tensor
    owner_P: Tensor
    piece_XJ: Tensor


def segments_of(counts: Sequence[int], device: torch.device) -> Segments:
    """Segments of these lengths, concatenated."""
    starts = list(accumulate(counts, initial=0))
    owner: list[int] = []
    sizes: list[int] = []
    pieces: list[list[int]] = []
    for segment, count in enumerate(counts):
        first = len(owner)
        cut = [min(PIECE, count - at) for at in range(0, count, PIECE)]
        owner += [segment] * len(cut)
        sizes += cut
        pieces.append(list(range(first, len(owner))))
    most = max(map(len, pieces))
    table = [[*of, *[len(owner)] * (most - len(of))] for of in pieces]

    def put(values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    bounds = put(list(accumulate(sizes, initial=0)), torch.int32)
    return Segments(put(starts[:-1]), put(counts), max(counts), bounds, put(owner), put(table))


def even_attention(q_BGRD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every query over all S keys of its sequence and KV head.

    Returns:
        out_BGRD in q's dtype, lse_BGR in fp32 (fp64 for fp64).
    """
    if q_BGRD.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(q_BGRD, k_BGSD, v_BGSD, scale=scale)[:2]
    if split_serves(q_BGRD):
        return torch.ops.aten._scaled_dot_product_flash_attention(q_BGRD, k_BGSD, v_BGSD, scale=scale)[:2]
    return masked_rows(q_BGRD, k_BGSD, v_BGSD, None, scale=scale)


def ragged_attention(
    q_BGRD: Tensor, k_ND: Tensor, v_ND: Tensor, segments: Segments, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of every query over all keys of its segment.

    Args:
        q_BGRD: queries, the query heads of a KV head packed as rows.
        k_ND: keys of all segments.
        v_ND: values.
        segments: ranges of the segments.
        scale: softmax scale.

    Returns:
        out_BGRD in q's dtype, lse_BGR in fp32 (fp64 for fp64).
    """
    B, G, R, D = q_BGRD.shape
    q_XRD = q_BGRD.reshape(B * G, R, D)  # a segment for each sequence and KV head
    serves = split_serves(q_BGRD)
    out, lse = (_flash if serves else _padded)(q_XRD, k_ND, v_ND, segments, scale)
    return out.view(B, G, R, D), lse.view(B, G, R)


def masked_rows(
    q_BGRD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, visible_B1RS: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Plain attention under a mask with its lse, in fp32 or wider; 0 and -inf where nothing is seen."""
    wide = torch.promote_types(q_BGRD.dtype, torch.float32)
    score_BGRS = (q_BGRD.to(wide) * scale) @ k_BGSD.to(wide).transpose(-1, -2)
    if visible_B1RS is not None:
        score_BGRS = score_BGRS.masked_fill(~visible_B1RS, -torch.inf)
    lse_BGR = torch.logsumexp(score_BGRS, -1)
    weight_BGRS = torch.exp(score_BGRS - lse_BGR.masked_fill(lse_BGR == -torch.inf, 0)[..., None])
    return (weight_BGRS @ v_BGSD.to(wide)).to(q_BGRD.dtype), lse_BGR


def merge_pieces(out_PRD: Tensor, lse_PR: Tensor, piece_XJ: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of whole segments from that of their pieces: out_XRD and lse_XR in lse's dtype."""
    none_R = lse_PR.new_full((1, lse_PR.shape[1]), -torch.inf)
    zero_RD = out_PRD.new_zeros(1, *out_PRD.shape[1:])
    lse_XJR = torch.cat((lse_PR, none_R))[piece_XJ]
    lse_XR = torch.logsumexp(lse_XJR, 1)
    share_XJR = torch.exp(lse_XJR - lse_XR[:, None])
    out_XJRD = torch.cat((out_PRD, zero_RD))[piece_XJ].to(lse_PR.dtype)
    return (out_XJRD * share_XJR[..., None]).sum(1), lse_XR


def _padded(
    q_XRD: Tensor, k_ND: Tensor, v_ND: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of segments padded to the longest, under a mask."""
    at_S = torch.arange(segments.longest, device=q_XRD.device)
    inside_XS = at_S < segments.count_X[:, None]
    row_XS = segments.start_X[:, None] + torch.where(inside_XS, at_S, 0)
    out, lse = masked_rows(
        q_XRD[None], k_ND[row_XS][None], v_ND[row_XS][None], inside_XS[None, :, None], scale=scale
    )
    return out[0], lse[0]


def _flash(
    q_XRD: Tensor, k_ND: Tensor, v_ND: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention with the pieces as sequences of one variable-length call, merged by lse."""
    X, R, D = q_XRD.shape
    P = len(segments.owner_P)
    q_PRD = q_XRD if P == X else q_XRD[segments.owner_P]
    out, lse = torch.ops.aten._flash_attention_forward(
        q_PRD.reshape(P * R, 1, D),
        k_ND[:, None],
        v_ND[:, None],
        _steps(P, R, q_XRD.device),
        segments.bounds_P,
        max(R, 2),  # with a maximum of 1 query the kernel gives its lse another layout
        min(segments.longest, PIECE),
        0.0,
        False,
        False,
        scale=scale,
    )[:2]
    # the lse is [1, P * R], or padded [P, 1, queries] in older versions of torch
    lse_PR = lse.view(P, R) if lse.dim() == 2 else lse[:, 0, :R]
    out_PRD = out.view(P, R, D)
    if P == X:
        return out_PRD, lse_PR
    merged, lse_XR = merge_pieces(out_PRD, lse_PR, segments.piece_XJ)
    return merged.to(q_XRD.dtype), lse_XR


@lru_cache(maxsize=256)
def _steps(count: int, size: int, device: torch.device) -> Tensor:
    """Bounds of `count` sequences of `size` tokens."""
    return torch.arange(0, (count + 1) * size, size, dtype=torch.int32, device=device)
