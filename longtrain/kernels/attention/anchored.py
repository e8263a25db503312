"""Attention of blocks of tokens: each block sees the keys before its anchor, and all keys of its own.

Formula, for every row of block n: one softmax over scale * q·k_c for the keys c of its document with
max(start_n, anchor_n - window) <= c < anchor_n, and over scale * q·o_j for all rows j of the block. Blocks do
not see each other. Drafts that predict a block in one pass (DFlash, DSpark) are trained with it.

Blocks of one document are processed in groups. Keys that every block of a group sees (`far`) need no mask:
half precision on a GPU uses flash attention for them, merged by lse with the keys under a mask and the
blocks' own. With the lse of the whole softmax, exp(s - lse) is a key's weight in either part, so the backward
takes both parts separately as well, and no mask of all queries and keys exists.

Shapes: N blocks, R rows of a block, S keys, H query heads, G KV heads, X = R * H / G rows of a block that
read one KV head, D head dim, M blocks of a group, C keys under a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.attention import flash
from longtrain.kernels.devices import dense_rows

_BLOCKS = 64
"""Most blocks of a group."""
_SPAN = 1024
"""Most keys between the first and the last anchor of a group, where others are left to flash attention."""
_SCORES = 2**26
"""Most scores of a group in fp32 where no keys are left to flash attention, but for a group of one block."""


@dataclass(frozen=True)
class _BlockGroup:
    """Blocks `first:last`: all of them see keys `far:near`, some see keys `low:far` and `near:high`.

    `low <= far <= near <= high`.
    """

    first: int
    last: int
    low: int
    far: int
    near: int
    high: int


def anchored_attention(
    q_NRHD: Tensor,
    own: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    anchors: Sequence[int],
    starts: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of blocks over the keys before their anchors and their own; differentiable in all tensors.

    Args:
        q_NRHD: queries, after RoPE.
        own: keys and values of the blocks' own rows, each [N, R, G, D].
        keys: keys and values that blocks share, each [S, G, D].
        anchors: for each block, one past the last shared key that it sees; ascending, on the host.
        starts: for each block, the first shared key of its document.
        scale: softmax scale.
        window: number of keys before the anchor that a block sees; None: all of its document.

    Returns:
        out_NRHD in q's dtype.

    Raises:
        DataError: anchors that decrease, lie before their document's start or beyond the keys.
    """
    N, R, H, _ = q_NRHD.shape
    k_SGD, v_SGD = keys
    G = k_SGD.shape[1]
    bounds = list(zip(starts, anchors, strict=True))
    ordered = all(a <= b for a, b in pairwise(anchors))
    if len(bounds) != N or not ordered or any(not 0 <= s <= a <= len(k_SGD) for s, a in bounds):
        raise refusal(
            DataError,
            f"attention of {N} blocks at anchors {tuple(anchors)[:8]} over {len(k_SGD)} keys",
            "ascending anchors, one for each block, between the start of its document and the last key",
        )
    fast = flash.flash_serves(q_NRHD.flatten(0, 1), k_SGD)
    most = _BLOCKS if fast else min(_BLOCKS, _SCORES // max(1, R * H * max(anchors, default=0)))
    groups = _groups(bounds, window, most=most, span=_SPAN if fast else None)
    # rows and the query heads of a KV head side by side, so that K is not repeated
    q_NGXD = q_NRHD.unflatten(2, (G, H // G)).transpose(1, 2).flatten(2, 3)
    own_NGRD = (x_NRGD.transpose(1, 2) for x_NRGD in own)
    anchor_N = torch.tensor(anchors, dtype=torch.int64).to(q_NRHD.device, non_blocking=True)
    out_NGXD = _Anchored.apply(q_NGXD, *own_NGRD, k_SGD, v_SGD, groups, scale, window, anchor_N)
    return out_NGXD.unflatten(2, (R, H // G)).transpose(1, 2).flatten(2, 3)


def _groups(
    bounds: list[tuple[int, int]], window: int | None, *, most: int, span: int | None
) -> list[_BlockGroup]:
    """Group blocks of one document; with `span`, only those whose anchors are near to each other.

    Args:
        bounds: start and anchor of each block.
        window: as in `anchored_attention`.
        most: most blocks of a group; one has at least one.
        span: most keys between the anchors of a group; None: any number, and no keys are left to flash.
    """
    groups: list[_BlockGroup] = []
    at = 0
    while at < len(bounds):
        start, anchor = bounds[at]
        end = at + 1
        while (
            end < len(bounds)
            and end - at < most
            and bounds[end][0] == start
            and (span is None or bounds[end][1] - anchor <= span)
        ):
            end += 1
        high = bounds[end - 1][1]
        low, all_see = (start, start) if window is None else (max(start, x - window) for x in (anchor, high))
        if span is None or all_see >= anchor:
            groups.append(_BlockGroup(at, end, low, low, low, high))
        else:
            groups.append(_BlockGroup(at, end, low, all_see, anchor, high))
        at = end
    return groups


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function without autocast, which would round products of fp32 to half precision.

    The backward needs it too: it runs under the autocast of its caller, as in `longtrain.chunked`.
    """

    @wraps(function)
    def call(ctx: Any, first: Tensor, *rest: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return function(ctx, first, *rest)

    return call


class _Anchored(torch.autograd.Function):
    """Autograd function of `anchored_attention`, group by group in either direction."""

    @staticmethod
    @_wide
    def forward(
        ctx: Any,
        q: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        k: Tensor,
        v: Tensor,
        groups: list[_BlockGroup],
        scale: float,
        window: int | None,
        anchor_N: Tensor,
    ) -> Tensor:
        """The output, and for the backward the log-sum-exp of all scores."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)
        seeds: list[Tensor] = []
        for group in groups:
            rows = slice(group.first, group.last)
            masked, own_scores, values = _near(q, own_k, k, v, group, scale, window, anchor_N)
            lse_MGX = torch.logaddexp(masked.logsumexp(-1), own_scores.logsumexp(-1))
            far = None
            if group.far < group.near:
                far, far_lse, *more = _far_forward(q[rows], k, v, group, scale)
                lse_MGX = torch.logaddexp(lse_MGX, far_lse)
                seeds += more
            mixed = _mix(torch.exp(masked - lse_MGX[..., None]), values)
            mixed += torch.exp(own_scores - lse_MGX[..., None]) @ own_v[rows].to(wide)
            if far is not None:
                mixed += torch.exp(far_lse - lse_MGX)[..., None] * far
            out[rows], lse[rows] = mixed, lse_MGX
        ctx.save_for_backward(q, own_k, own_v, k, v, out, lse, anchor_N, *seeds)
        ctx.settings = (groups, scale, window)
        return out

    @staticmethod
    @_wide
    def backward(ctx: Any, *grads: Any) -> Any:
        """With P = exp(s - lse) and delta = rowsum(dO * O) over all keys: ds = P (dO·v - delta)."""
        q, own_k, own_v, k, v, out, lse, anchor_N, *seeds = ctx.saved_tensors
        groups, scale, window = ctx.settings
        wide = lse.dtype
        grad = grads[0].contiguous()
        dq, dk_own, dv_own = (torch.empty_like(x, dtype=wide) for x in (q, own_k, own_v))
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        for group in groups:
            rows = slice(group.first, group.last)
            masked, own_scores, values = _near(q, own_k, k, v, group, scale, window, anchor_N)
            lse_MGX1, grad_MGXD, q_MGXD = lse[rows, ..., None], grad[rows].to(wide), q[rows].to(wide)
            delta_MGX1 = (grad_MGXD * out[rows].to(wide)).sum(-1, keepdim=True)
            # the blocks' own keys
            p_MGXR = torch.exp(own_scores - lse_MGX1)
            ds_MGXR = p_MGXR * (grad_MGXD @ own_v[rows].to(wide).mT - delta_MGX1) * scale
            dk_own[rows] = ds_MGXR.mT @ q_MGXD
            dv_own[rows] = p_MGXR.mT @ grad_MGXD
            dq[rows] = ds_MGXR @ own_k[rows].to(wide)
            # shared keys under a mask
            p_MGXC = torch.exp(masked - lse_MGX1)
            ds_MGXC = p_MGXC * (_scores(grad_MGXD, values) - delta_MGX1) * scale
            keys = torch.cat([k[part] for part in _masked_parts(group)]).to(wide)
            dq[rows] += _mix(ds_MGXC, keys)
            at = 0
            for part in _masked_parts(group):
                n = part.stop - part.start
                dk[part] += torch.einsum("mgxc,mgxd->cgd", ds_MGXC[..., at : at + n], q_MGXD)
                dv[part] += torch.einsum("mgxc,mgxd->cgd", p_MGXC[..., at : at + n], grad_MGXD)
                at += n
            # shared keys that all blocks of the group see
            if group.far < group.near:
                pair, seeds = seeds[:2], seeds[2:]
                dq[rows] += _far_backward(
                    grad[rows], q[rows], k, v, out[rows], lse[rows], group, pair, scale, dk, dv
                )
        made = (dq, dk_own, dv_own, dk, dv)
        given = (q, own_k, own_v, k, v)
        grads_in = (x.to(like.dtype) for x, like in zip(made, given, strict=True))
        return *grads_in, None, None, None, None


def _masked_parts(group: _BlockGroup) -> tuple[slice, slice]:
    """The keys that only some blocks of a group see."""
    return slice(group.low, group.far), slice(group.near, group.high)


def _near(
    q: Tensor,
    own_k: Tensor,
    k: Tensor,
    v: Tensor,
    group: _BlockGroup,
    scale: float,
    window: int | None,
    anchor_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of keys under the mask [M, G, X, C] and of own keys [M, G, X, R], and values [C, G, D]."""
    rows, parts = slice(group.first, group.last), _masked_parts(group)
    wide = torch.promote_types(q.dtype, torch.float32)
    q_MGXD = q[rows].to(wide)
    k_CGD, v_CGD = (torch.cat([x[part] for part in parts]).to(wide) for x in (k, v))
    place_C = torch.cat([torch.arange(part.start, part.stop, device=q.device) for part in parts])
    anchor_M1 = anchor_N[rows, None]
    seen_MC = place_C < anchor_M1
    if window is not None:
        seen_MC &= place_C >= anchor_M1 - window
    masked = (_scores(q_MGXD, k_CGD) * scale).masked_fill(~seen_MC[:, None, None], -torch.inf)
    return masked, q_MGXD @ own_k[rows].to(wide).mT * scale, v_CGD


def _scores(q_MGXD: Tensor, k_CGD: Tensor) -> Tensor:
    """Products of all rows with shared keys, [M, G, X, C], as one matrix product for each KV head."""
    M, G, X, D = q_MGXD.shape
    flat = q_MGXD.transpose(0, 1).reshape(G, M * X, D) @ k_CGD.permute(1, 2, 0)
    return flat.view(G, M, X, len(k_CGD)).transpose(0, 1)


def _mix(weight_MGXC: Tensor, v_CGD: Tensor) -> Tensor:
    """Weighted sums of shared values, [M, G, X, D]."""
    M, G, X, C = weight_MGXC.shape
    flat = weight_MGXC.transpose(0, 1).reshape(G, M * X, C) @ v_CGD.transpose(0, 1)
    return flat.view(G, M, X, v_CGD.shape[-1]).transpose(0, 1)


def _far_forward(
    q_MGXD: Tensor, k: Tensor, v: Tensor, group: _BlockGroup, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over the keys that all rows see: out [M, G, X, D], lse [M, G, X], and flash's two seeds."""
    M, G, X, D = q_MGXD.shape
    rows_YGD, k_FGD, v_FGD = _far_inputs(q_MGXD, k, v, group)
    cu_q, cu_k = (flash._cumulative((len(x),), q_MGXD.device) for x in (rows_YGD, k_FGD))
    out_YGD, lse_GY, *seeds = torch.ops.aten._flash_attention_forward(
        rows_YGD, k_FGD, v_FGD, cu_q, cu_k, flash._longest((M * X,)), len(k_FGD), 0.0, False, False,
        scale=scale,
    )[:4]  # fmt: skip
    lse_MGX = lse_GY.view(G, M, X).transpose(0, 1)
    return out_YGD.reshape(M, X, G, D).transpose(1, 2), lse_MGX, seeds[0], seeds[1]


def _far_backward(
    grad_MGXD: Tensor,
    q_MGXD: Tensor,
    k: Tensor,
    v: Tensor,
    out_MGXD: Tensor,
    lse_MGX: Tensor,
    group: _BlockGroup,
    seeds: Sequence[Tensor],
    scale: float,
    dk: Tensor,
    dv: Tensor,
) -> Tensor:
    """Add the gradients of the keys that all rows see to `dk` and `dv`; return the queries', [M, G, X, D].

    `out_MGXD` and `lse_MGX` are those of the whole softmax.
    """
    M, G, X, D = q_MGXD.shape
    rows_YGD, k_FGD, v_FGD = _far_inputs(q_MGXD, k, v, group)
    grad_YGD, out_YGD = (x.transpose(1, 2).reshape(M * X, G, D) for x in (grad_MGXD, out_MGXD))
    lse_GY = lse_MGX.transpose(0, 1).reshape(G, M * X)
    cu_q, cu_k = (flash._cumulative((len(x),), q_MGXD.device) for x in (rows_YGD, k_FGD))
    dq_YGD, dk_FGD, dv_FGD = torch.ops.aten._flash_attention_backward(
        grad_YGD, rows_YGD, k_FGD, v_FGD, out_YGD, lse_GY, cu_q, cu_k, flash._longest((M * X,)), len(k_FGD),
        0.0, False, *seeds, scale=scale,
    )  # fmt: skip
    dk[group.far : group.near] += dk_FGD
    dv[group.far : group.near] += dv_FGD
    return dq_YGD.reshape(M, X, G, D).transpose(1, 2)


def _far_inputs(q_MGXD: Tensor, k: Tensor, v: Tensor, group: _BlockGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of all blocks as rows of G heads, [M * X, G, D], and the keys and values that all see."""
    M, G, X, D = q_MGXD.shape
    rows_YGD = q_MGXD.transpose(1, 2).reshape(M * X, G, D)
    return rows_YGD, dense_rows(k[group.far : group.near]), dense_rows(v[group.far : group.near])
