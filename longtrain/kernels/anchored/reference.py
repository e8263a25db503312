"""The reference implementation of `kernels.anchored` in plain torch, group by group of blocks.

With the lse of the whole softmax, exp(s - lse) is a key's weight, so no mask of all queries and keys exists.

Shapes: as in `kernels.anchored`; X = R * H / G rows of a block that read one KV head, M blocks of a group, C
shared keys that one of them sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_BLOCKS = 64
"""Most blocks of a group."""
_SCORES = 2**26
"""Most scores of a group, but for a group of one block."""

_Group = tuple[slice, slice]
"""Blocks, and the shared keys that one of them sees."""


def anchored(
    q_NRHD: Tensor,
    own: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    low_N: Tensor,
    high_N: Tensor,
    *,
    scale: float,
) -> Tensor:
    """See `kernels.anchored.anchored_attention`; blocks see shared keys low <= c < high."""
    _, R, H, _ = q_NRHD.shape
    G = keys[0].shape[1]
    # rows and the query heads of a KV head side by side, so that K is not repeated
    q_NGXD = q_NRHD.unflatten(2, (G, H // G)).transpose(1, 2).flatten(2, 3)
    own_NGRD = (x_NRGD.transpose(1, 2) for x_NRGD in own)
    groups = _groups(low_N.tolist(), high_N.tolist(), R * H)
    ends_2N = torch.stack((low_N, high_N)).to(q_NRHD.device, non_blocking=True)
    out_NGXD = _Anchored.apply(q_NGXD, *own_NGRD, *keys, groups, scale, ends_2N)
    return out_NGXD.unflatten(2, (R, H // G)).transpose(1, 2).flatten(2, 3)


def _groups(low_N: list[int], high_N: list[int], rows: int) -> list[_Group]:
    """Cut blocks of so many rows into groups."""
    groups: list[_Group] = []
    at = 0
    while at < len(low_N):
        end = at + 1
        while (
            end < min(len(low_N), at + _BLOCKS)
            and (end + 1 - at) * rows * (high_N[end] - low_N[at]) <= _SCORES
            and low_N[end] < high_N[at]
        ):
            end += 1
        groups.append((slice(at, end), slice(low_N[at], high_N[end - 1])))
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
    """Autograd function of `anchored`, group by group in either direction."""

    @staticmethod
    @_wide
    def forward(
        ctx: Any, q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor,
        groups: list[_Group], scale: float, ends_2N: Tensor,
    ) -> Tensor:  # fmt: skip
        """The output, and for the backward the log-sum-exp of all scores."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)
        for rows, part in groups:
            shared, own_scores = _all_scores(
                q[rows], own_k[rows], k[part], ends_2N[:, rows] - part.start, scale
            )
            lse_MGX = torch.logaddexp(shared.logsumexp(-1), own_scores.logsumexp(-1))
            mixed = _mix(torch.exp(shared - lse_MGX[..., None]), v[part].to(wide))
            mixed += torch.exp(own_scores - lse_MGX[..., None]) @ own_v[rows].to(wide)
            out[rows], lse[rows] = mixed, lse_MGX
        ctx.save_for_backward(q, own_k, own_v, k, v, out, lse, ends_2N)
        ctx.settings = (groups, scale)
        return out

    @staticmethod
    @_wide
    def backward(ctx: Any, *grads: Any) -> Any:
        """With P = exp(s - lse) and delta = rowsum(dO * O) over all keys: ds = P (dO·v - delta)."""
        q, own_k, own_v, k, v, out, lse, ends_2N = ctx.saved_tensors
        groups, scale = ctx.settings
        wide = lse.dtype
        dq, dk_own, dv_own = (torch.empty_like(x, dtype=wide) for x in (q, own_k, own_v))
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        for rows, part in groups:
            shared, own_scores = _all_scores(
                q[rows], own_k[rows], k[part], ends_2N[:, rows] - part.start, scale
            )
            lse_MGX1, grad_MGXD, q_MGXD = lse[rows, ..., None], grads[0][rows].to(wide), q[rows].to(wide)
            delta_MGX1 = (grad_MGXD * out[rows].to(wide)).sum(-1, keepdim=True)
            # the blocks' own keys
            p_MGXR = torch.exp(own_scores - lse_MGX1)
            ds_MGXR = p_MGXR * (grad_MGXD @ own_v[rows].to(wide).mT - delta_MGX1) * scale
            dk_own[rows] = ds_MGXR.mT @ q_MGXD
            dv_own[rows] = p_MGXR.mT @ grad_MGXD
            # shared keys
            p_MGXC = torch.exp(shared - lse_MGX1)
            ds_MGXC = p_MGXC * (_scores(grad_MGXD, v[part].to(wide)) - delta_MGX1) * scale
            dq[rows] = ds_MGXR @ own_k[rows].to(wide) + _mix(ds_MGXC, k[part].to(wide))
            dk[part] += torch.einsum("mgxc,mgxd->cgd", ds_MGXC, q_MGXD)
            dv[part] += torch.einsum("mgxc,mgxd->cgd", p_MGXC, grad_MGXD)
        made = zip((dq, dk_own, dv_own, dk, dv), (q, own_k, own_v, k, v), strict=True)
        return *(x.to(like.dtype) for x, like in made), None, None, None


def _all_scores(
    q_MGXD: Tensor, own_MGRD: Tensor, k_CGD: Tensor, ends_2M: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores of shared keys, [M, G, X, C], -inf where `ends_2M` excludes them; of own keys, [M, G, X, R]."""
    wide = torch.promote_types(q_MGXD.dtype, torch.float32)
    q_MGXD = q_MGXD.to(wide)
    place_C = torch.arange(len(k_CGD), device=q_MGXD.device)
    low_M1, high_M1 = ends_2M[..., None]
    hidden_MC = (place_C < low_M1) | (place_C >= high_M1)
    score_MGXC = _scores(q_MGXD, k_CGD.to(wide)) * scale
    return score_MGXC.masked_fill(hidden_MC[:, None, None], -torch.inf), q_MGXD @ own_MGRD.to(wide).mT * scale


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
