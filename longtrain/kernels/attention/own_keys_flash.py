"""Flash attention over segments merged with own keys of each row, and its gradient.

With the lse of the whole softmax, P = exp(s - lse) is the weight of a key wherever it stands, and
delta = rowsum(dO * O) of the merged output is what every score's gradient P (dP - delta) subtracts. So
flash's backward kernel, given the merged output and lse, gives the exact dQ, dK and dV of the segments' part,
and the own keys' part is elementwise. Keys of a long segment are gone over in blocks: flash's backward writes
dK and dV of every query head, which for a long prefix would be larger than everything else in a step.
Shapes: T queries, S keys, H query heads, G KV heads, D head dim, g = H / G.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longtrain.kernels.attention import flash
from longtrain.kernels.attention.segments import Segment, joined


class OwnKeysFlash(torch.autograd.Function):
    """See `own_keys.own_keys_attention`, whose checked segments hold every row."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: list[Segment],
        scale: float,
        window: int | None,
        visible: tuple[Tensor | None, ...],
        *own: Tensor,
    ) -> Tensor:
        """Each run of segments by the kernel, then the own keys by their lse."""
        wide = torch.promote_types(q.dtype, torch.float32)
        runs = _runs(parts, window)
        outs, lses, seeds = [], [], []
        for run in runs:
            args: tuple[Any, ...] = (*_inputs(q, k, v, run), scale, window)
            out, lse, *seed = flash._forward(*args)
            outs.append(out)
            lses.append(lse)
            seeds.append(seed)
        out_THD, lse_TH = torch.cat(outs).to(wide), torch.cat(lses, 1).t().to(wide)
        if own:
            scores = _own_scores(q.to(wide), own[::2], visible, scale)
            merged_TH = torch.stack([lse_TH, *scores]).logsumexp(0)
            out_THD *= (lse_TH - merged_TH).exp()[..., None]
            for score_TH, v_TGD in zip(scores, own[1::2], strict=True):
                out_THD += _to_heads((score_TH - merged_TH).exp()[..., None], v_TGD)
            lse_TH = merged_TH
        out = out_THD.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse_TH, *(seed for some in seeds for seed in some), *own)
        ctx.settings = (runs, scale, window, visible)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The kernel's gradients under the merged lse, and those of the own keys."""
        runs, scale, window, visible = ctx.settings
        q, k, v, out, lse_TH, *rest = ctx.saved_tensors
        seeds, own = rest[: 2 * len(runs)], rest[2 * len(runs) :]
        grad = grads[0].contiguous()
        wide = lse_TH.dtype
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i, run in enumerate(runs):
            _run_backward(
                grad, q, k, v, out, lse_TH, run, seeds[2 * i : 2 * i + 2], scale, window, dq, dk, dv
            )
        d_own = _own_backward(grad.to(wide), q.to(wide), out, lse_TH, own, visible, scale, dq) if own else []
        return dq.to(q.dtype), dk, dv, None, None, None, None, *d_own


def _runs(parts: list[Segment], window: int | None) -> list[list[Segment]]:
    """Segments that share a call of the kernel; one over many more keys than queries has its own."""
    runs: list[list[Segment]] = []
    for part in parts:
        if runs and not (_far(part, window) or _far(runs[-1][0], window)):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _far(part: Segment, window: int | None) -> bool:
    return window is None and part.k_stop - part.k_start - (part.q_stop - part.q_start) >= flash.BLOCK


def _inputs(q: Tensor, k: Tensor, v: Tensor, run: list[Segment]) -> tuple[Any, ...]:
    """q, k, v, their bounds and longest segments, as the kernels take them."""
    n_q = tuple(part.q_stop - part.q_start for part in run)
    n_k = tuple(part.k_stop - part.k_start for part in run)
    k_spans = [(part.k_start, part.k_stop) for part in run]
    rows = (q[run[0].q_start : run[-1].q_stop], joined(k, k_spans), joined(v, k_spans))
    bounds = (flash._cumulative(n_q, q.device), flash._cumulative(n_k, q.device))
    return *rows, *bounds, flash._longest(n_q), max(n_k)


def _run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_TH: Tensor,
    run: list[Segment],
    seeds: list[Tensor],
    scale: float,
    window: int | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add a run's part to dq, and write dk and dv of its keys."""
    rows = slice(run[0].q_start, run[-1].q_stop)
    lse_HT = lse_TH[rows].t().contiguous()

    def back(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, n_q: int, n_k: int, causal: bool
    ) -> Any:
        return torch.ops.aten._flash_attention_backward(
            grad[rows], *(flash._rows(x) for x in (q, k, v)), out[rows], lse_HT, cu_q, cu_k, n_q, n_k, 0.0,
            causal, *seeds, scale=scale, **flash._sides(window),
        )  # fmt: skip

    if not _far(run[0], window):
        args: tuple[Any, ...] = (*_inputs(q, k, v, run), window is None)
        d_q, d_k, d_v = back(*args)
        dq[rows] += d_q
        at = 0
        for part in run:
            n = part.k_stop - part.k_start
            dk[part.k_start : part.k_stop] = d_k[at : at + n]
            dv[part.k_start : part.k_stop] = d_v[at : at + n]
            at += n
        return
    (part,) = run
    n_q, n_k = part.q_stop - part.q_start, part.k_stop - part.k_start
    for low, high, causal in flash.key_blocks(n_q, n_k, flash.BLOCK):
        keys = slice(part.k_start + low, part.k_start + high)
        cu_q, cu_k = flash._cumulative((n_q,), q.device), flash._cumulative((high - low,), q.device)
        d_q, dk[keys], dv[keys] = back(
            q[rows], k[keys], v[keys], cu_q, cu_k, flash._longest((n_q,)), high - low, causal
        )
        dq[rows] += d_q


def _own_backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse_TH: Tensor,
    own: list[Tensor],
    visible: tuple[Tensor | None, ...],
    scale: float,
    dq: Tensor,
) -> list[Tensor]:
    """Add the own keys' part to dq; dk and dv of each, in turns."""
    delta_TH = (grad * out.to(grad.dtype)).sum(-1)
    found = []
    scores = _own_scores(q, own[::2], visible, scale)
    for score_TH, k_TGD, v_TGD in zip(scores, own[::2], own[1::2], strict=True):
        weight_TH = (score_TH - lse_TH).exp()
        d_score_TH = weight_TH * (_dots(grad, v_TGD) - delta_TH) * scale
        dq += _to_heads(d_score_TH[..., None], k_TGD)
        found += [_from_heads(d_score_TH, q, k_TGD), _from_heads(weight_TH, grad, v_TGD)]
    return found


def _own_scores(
    q: Tensor, keys: tuple[Tensor, ...] | list[Tensor], visible: tuple[Tensor | None, ...], scale: float
) -> list[Tensor]:
    """Scaled q·k of each own key, [T, H]; -inf where a row does not see it."""
    scores = [_dots(q, k_TGD) * scale for k_TGD in keys]
    return [
        score if seen_T is None else score.masked_fill(~seen_T[:, None], -torch.inf)
        for score, seen_T in zip(scores, visible, strict=True)
    ]


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
