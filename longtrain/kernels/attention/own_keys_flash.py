"""Flash attention over segments merged with own keys of each token, and its gradient.

With the lse of the whole softmax, P = exp(s - lse) is the weight of a key in either part, and
delta = rowsum(dO * O) of the merged output is subtracted in every score's gradient P (dP - delta). So flash's
backward kernel, given the merged output and lse, gives the exact dQ, dK and dV of the segments' part, and
`kernels.own_keys` the own keys' part. Keys of a long segment are processed in blocks: flash's backward writes
dK and dV of every query head, which for a long prefix would be larger than everything else in a step.

Shapes: T queries, S keys, H query heads, G KV heads, D head dim, M own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longtrain.kernels.attention import flash
from longtrain.kernels.attention.segments import Segment, joined
from longtrain.kernels.devices import dense_rows
from longtrain.kernels.own_keys import OwnKeys, merge, merge_backward


class OwnKeysFlash(torch.autograd.Function):
    """Autograd function of `own_keys.own_keys_attention`; its segments are checked and cover every token."""

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
        """Attention of each run of segments by the flash kernel, merged with the own keys by lse."""
        runs = _runs(parts, window)
        outs, lses, seeds = [], [], []
        for run in runs:
            args: tuple[Any, ...] = (*_inputs(q, k, v, run), scale, window)
            out, lse, *seed = flash._forward(*args)
            outs.append(out)
            lses.append(lse)
            seeds.append(seed)
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        lse_TH = (lses[0] if len(lses) == 1 else torch.cat(lses, 1)).t()
        seen_MT = _seen(visible)
        if own:
            out, lse_TH = merge(q, out, lse_TH, _stacked(own, seen_MT), scale=scale)
        ctx.save_for_backward(q, k, v, out, lse_TH, seen_MT, *(seed for some in seeds for seed in some), *own)
        ctx.settings = (runs, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of the flash kernel under the merged lse, and of the own keys."""
        runs, scale, window = ctx.settings
        q, k, v, out, lse_TH, seen_MT, *rest = ctx.saved_tensors
        seeds, own = rest[: 2 * len(runs)], rest[2 * len(runs) :]
        grad, lse_HT = grads[0].contiguous(), lse_TH.t().contiguous()
        if len(runs) == 1 and not _far(runs[0][0], window) and _covers(runs[0], q, k):
            dq, dk, dv = _near(grad, q, k, v, out, lse_HT, runs[0], seeds, scale, window)
        else:
            dq = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for i, run in enumerate(runs):
                pair = seeds[2 * i : 2 * i + 2]
                _run_backward(grad, q, k, v, out, lse_HT, run, pair, scale, window, dq, dk, dv)
        d_own: list[Tensor] = []
        if own:
            keys = _stacked(own, seen_MT)
            dq, dk_MTGD, dv_MTGD = merge_backward(grad, q, out, lse_TH, keys, dq, scale=scale)
            d_own = [part for pair in zip(dk_MTGD, dv_MTGD, strict=True) for part in pair]
        return dq.to(q.dtype), dk, dv, None, None, None, None, *d_own


def _stacked(own: Sequence[Tensor], seen_MT: Tensor | None) -> OwnKeys:
    """Stack alternating keys and values, with their mask."""
    return OwnKeys(torch.stack(list(own[::2])), torch.stack(list(own[1::2])), seen_MT)


def _seen(visible: tuple[Tensor | None, ...]) -> Tensor | None:
    """Stack the masks of all own keys, [M, T]; None if every query sees every key."""
    known = [seen_T for seen_T in visible if seen_T is not None]
    if not known:
        return None
    every_T = torch.ones_like(known[0])
    return torch.stack([every_T if seen_T is None else seen_T for seen_T in visible])


def _runs(parts: list[Segment], window: int | None) -> list[list[Segment]]:
    """Group segments that share a call of the kernel; one with many more keys than queries is alone."""
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
    """q, k, v, their bounds and longest segments, in the kernels' argument order."""
    n_q = tuple(part.q_stop - part.q_start for part in run)
    n_k = tuple(part.k_stop - part.k_start for part in run)
    k_spans = [(part.k_start, part.k_stop) for part in run]
    rows = (q[run[0].q_start : run[-1].q_stop], joined(k, k_spans), joined(v, k_spans))
    bounds = (flash._cumulative(n_q, q.device), flash._cumulative(n_k, q.device))
    return *rows, *bounds, flash._longest(n_q), max(n_k)


def _covers(run: list[Segment], q: Tensor, k: Tensor) -> bool:
    """True if the segments cover all of q and all of k, without gaps."""
    begins = (run[0].q_start, run[0].k_start) == (0, 0)
    ends = (run[-1].q_stop, run[-1].k_stop) == (len(q), len(k))
    return begins and ends and all(a.k_stop == b.k_start for a, b in pairwise(run))


def _near(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_HT: Tensor,
    run: list[Segment],
    seeds: list[Tensor],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries and keys of a run of segments, in one call of the kernel."""
    rows = slice(run[0].q_start, run[-1].q_stop)
    args: tuple[Any, ...] = (*_inputs(q, k, v, run), window is None)
    return _backward(grad[rows], out[rows], lse_HT[:, rows], seeds, scale, window, *args)


def _backward(
    grad: Tensor,
    out: Tensor,
    lse_HT: Tensor,
    seeds: list[Tensor],
    scale: float,
    window: int | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    n_q: int,
    n_k: int,
    causal: bool,
) -> Any:
    return torch.ops.aten._flash_attention_backward(
        grad, *(dense_rows(x) for x in (q, k, v)), out, lse_HT.contiguous(), cu_q, cu_k, n_q, n_k, 0.0,
        causal, *seeds, scale=scale, **flash._sides(window),
    )  # fmt: skip


def _run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_HT: Tensor,
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
    if not _far(run[0], window):
        d_q, d_k, d_v = _near(grad, q, k, v, out, lse_HT, run, seeds, scale, window)
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
        d_q, dk[keys], dv[keys] = _backward(
            grad[rows], out[rows], lse_HT[:, rows], seeds, scale, window,
            q[rows], k[keys], v[keys], cu_q, cu_k, flash._longest((n_q,)), high - low, causal,
        )  # fmt: skip
        dq[rows] += d_q
