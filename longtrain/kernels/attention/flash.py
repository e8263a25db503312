"""Flash attention over packed segments on a GPU: torch's own kernel, or flash_attn if it is installed.

On a GPU of compute capability 9.0 long segments use torch's attention of whole sequences, which is cuDNN's:
up to twice as fast as the kernel for segments of different lengths. Adjacent segments of equal length share a
call.

K and V that need no gradient (a frozen target's) have a backward of their own: flash's backward always writes
dK and dV, expanded to the query heads, which for a long prefix is larger than everything else in a step. Over
blocks of keys, with the global lse, it gives the same dQ and stores only one block's dK and dV at a time.

Shapes: T queries, S keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from longtrain.kernels.attention.segments import Segment, cut, joined, spread
from longtrain.kernels.devices import dense_rows, hopper
from longtrain.log import get_logger

log = get_logger(__name__)

BLOCK = 8192
"""Keys of one block of the frozen-memory backward."""
_LARGE = 4000 * 128
"""Numbers of a query head from which on a segment is attended as a whole sequence."""
_FLASH_ATTN = find_spec("flash_attn") is not None
_NEEDED = {
    "_flash_attention_forward": {"cum_seq_q", "cum_seq_k", "is_causal", "scale", "window_size_left"},
    "_flash_attention_backward": {"out", "logsumexp", "is_causal", "scale", "window_size_left"},
}


def _operators_fit() -> bool:
    """True if this version of torch still has the private flash operators with the arguments used here."""
    for name, needed in _NEEDED.items():
        op = getattr(torch.ops.aten, name, None)
        missing = needed if op is None else needed - {arg.name for arg in op.default._schema.arguments}
        if missing:
            log.warning("flash_attention=off torch=%s op=%s lacks=%s", torch.__version__, name, missing)
            return False
    return True


_FITS = _operators_fit()


@lru_cache(maxsize=16)
def flash_device(device: torch.device) -> bool:
    """True if the device supports flash attention: CUDA with compute capability 8.0 or more."""
    return _FITS and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def wholes_pay(device: torch.device) -> bool:
    """True if cuDNN's attention of whole sequences is faster on the device than that of segments."""
    return hopper(device)


def flash_serves(q_THD: Tensor, k_SGD: Tensor) -> bool:
    """True if the flash kernel supports these tensors: half precision, head size 8, 16 .. 256."""
    D = q_THD.shape[2]
    half = q_THD.dtype in (torch.bfloat16, torch.float16) and k_SGD.dtype == q_THD.dtype
    return half and flash_device(q_THD.device) and D % 8 == 0 and D <= 256


def flash_segments(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, parts: list[Segment], *, scale: float, window: int | None
) -> Tensor:
    """`packed_attention` over checked segments; see there."""
    moving = [torch.is_grad_enabled() and x.requires_grad for x in (q_THD, k_SGD, v_SGD)]
    frozen = moving == [True, False, False]
    runs = [("short", parts)]
    if window is None:
        whole = _LARGE // q_THD.shape[2] if wholes_pay(q_THD.device) else None
        runs = _runs(parts, frozen=frozen, whole=whole)
    begin = cut if any(moving) else _tails
    q_runs = begin(q_THD, [(run[0].q_start, run[-1].q_stop) for _, run in runs])
    k_runs, v_runs = (begin(x, [(run[0].k_start, run[-1].k_stop) for _, run in runs]) for x in (k_SGD, v_SGD))
    outs = []
    for (kind, run), q, k, v in zip(runs, q_runs, k_runs, v_runs, strict=True):
        if kind == "far":
            outs.append(_FrozenMemory.apply(q, k, v, scale))
        elif kind == "long":
            outs.append(_whole(q, k, v, run, scale))
        else:
            outs.append(_short(q, k, v, run, scale=scale, window=window))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return spread(out, [(p.q_start, p.q_stop) for p in parts], len(q_THD))


def _tails(x: Tensor, spans: list[tuple[int, int]]) -> list[Tensor]:
    """Views of x from each span's start to its end; only for calls without gradients."""
    return [x[start:] for start, _ in spans]


def _runs(parts: list[Segment], *, frozen: bool, whole: int | None) -> list[tuple[str, list[Segment]]]:
    """Group adjacent segments into calls, each with the kind of that call.

    `short`: torch's kernel for segments of different lengths. `long`: adjacent segments of one length, as
    whole sequences. `far`: one segment whose frozen keys extend far beyond its queries.

    Args:
        parts: the segments.
        frozen: True if only queries need a gradient.
        whole: number of tokens from which on a segment is attended as a whole sequence; None: none is.
    """
    runs: list[tuple[str, list[Segment]]] = []
    for part in parts:
        rows, keys = part.q_stop - part.q_start, part.k_stop - part.k_start
        kind, joins = "short", bool(runs) and runs[-1][0] == "short"
        if frozen and keys - rows >= BLOCK:
            kind, joins = "far", False
        elif keys == rows and whole is not None and rows >= whole:
            last = runs[-1][1][-1] if runs and runs[-1][0] == "long" else None
            kind, joins = "long", last is not None and _follows(part, last)
        if joins:
            runs[-1][1].append(part)
        else:
            runs.append((kind, [part]))
    return runs


def _follows(part: Segment, last: Segment) -> bool:
    """True if a segment begins where the last one ends, has the same length, and no tokens after it."""
    rows = part.q_stop - part.q_start
    begins = (part.q_start, part.k_start) == (last.q_stop, last.k_stop)
    return begins and rows == last.q_stop - last.q_start and not _padding(rows)


def _padding(rows: int) -> int:
    """Number of tokens to append to a segment: cuDNN plans each new length, so few lengths are used."""
    return -rows % (1 << (rows.bit_length() - 5))


def _whole(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, run: list[Segment], scale: float) -> Tensor:
    """Causal attention of segments of one length as whole sequences.

    A segment whose length is rounded up (`_padding`) is extended by the tokens that follow it in the tensors,
    or by zeros if there are too few (with gradients none follow, since `cut` yields the segment alone). No
    query of the segment sees them, but their values are multiplied by weights of 0, so they must be finite.
    """
    n = run[0].q_stop - run[0].q_start
    more = _padding(n)

    def sequences(x_TXD: Tensor) -> Tensor:
        x_TXD = x_TXD[: len(run) * n + more]
        missing = len(run) * n + more - len(x_TXD)
        x_TXD = pad(x_TXD, (0, 0, 0, 0, 0, missing)) if missing else x_TXD
        return x_TXD.unflatten(0, (len(run), n + more)).transpose(1, 2)

    q, k, v = (sequences(x) for x in (q_THD, k_TGD, v_TGD))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)[:, :n].flatten(0, 1)


def _short(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, run: list[Segment], *, scale: float, window: int | None
) -> Tensor:
    """One call of the kernel for segments of different lengths; the tensors begin where the first does."""
    q_first, k_first = run[0].q_start, run[0].k_start
    q = joined(q_THD, [(p.q_start - q_first, p.q_stop - q_first) for p in run])
    k_spans = [(p.k_start - k_first, p.k_stop - k_first) for p in run]
    k, v = joined(k_SGD, k_spans), joined(v_SGD, k_spans)
    n_q = tuple(p.q_stop - p.q_start for p in run)
    n_k = tuple(p.k_stop - p.k_start for p in run)
    cu_q, cu_k = _cumulative(n_q, q.device), _cumulative(n_k, q.device)
    if _FLASH_ATTN:
        return _flash_attn(q, k, v, cu_q, cu_k, max(n_q), max(n_k), scale, window)
    return _Varlen.apply(q, k, v, cu_q, cu_k, _longest(n_q), max(n_k), scale, window)


def flash_lse(
    q_THD: Tensor, k_SGD: Tensor, parts: list[Segment], *, scale: float, window: int | None
) -> Tensor:
    """`packed_lse` over checked segments, in fp32; see there.

    It runs a pass of attention whose output is not used.
    """
    q = joined(q_THD.detach(), [(p.q_start, p.q_stop) for p in parts])
    k = joined(k_SGD.detach(), [(p.k_start, p.k_stop) for p in parts])
    n_q = tuple(p.q_stop - p.q_start for p in parts)
    n_k = tuple(p.k_stop - p.k_start for p in parts)
    bounds = _cumulative(n_q, q.device), _cumulative(n_k, q.device)
    lse_HQ = _forward(q, k, k, *bounds, _longest(n_q), max(n_k), scale, window)[1]
    lse_TH = lse_HQ.new_full((len(q_THD), q.shape[1]), -torch.inf)
    start = 0
    for part, rows in zip(parts, n_q, strict=True):
        lse_TH[part.q_start : part.q_stop] = lse_HQ[:, start : start + rows].T
        start += rows
    return lse_TH


@lru_cache(maxsize=64)
def _cumulative(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    total, bounds = 0, [0]
    for size in sizes:
        total += size
        bounds.append(total)
    return torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True)  # no wait for the device


def _flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    left = -1 if window is None else window
    return flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=True, window_size=(left, 0)
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, and the two values (seed and offset) that the backward needs unchanged."""
    return torch.ops.aten._flash_attention_forward(
        *(dense_rows(x) for x in (q, k, v)), cu_q, cu_k, max_q, max_k, 0.0, window is None, False,
        scale=scale, **_sides(window),
    )[:4]  # fmt: skip


def _sides(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window, "window_size_right": 0}


def _longest(sizes: tuple[int, ...]) -> int:
    """Longest segment, at least 2: with 1 the kernel would fold heads into queries, in its lse too."""
    return max(2, *sizes)


class _Varlen(torch.autograd.Function):
    """Torch's variable-length flash attention with its backward; causal, bottom-right aligned."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        out, lse, seed, offset = _forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, window)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, seed, offset)
        ctx.settings = (max_q, max_k, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, cu_q, cu_k, seed, offset = ctx.saved_tensors
        max_q, max_k, scale, window = ctx.settings
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), *(dense_rows(x) for x in (q, k, v)), out, lse, cu_q, cu_k, max_q, max_k,
            0.0, window is None, seed, offset, scale=scale, **_sides(window),
        )  # fmt: skip
        return dq, dk, dv, None, None, None, None, None, None


class _FrozenMemory(torch.autograd.Function):
    """One segment with many more keys than queries, whose K and V need no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        cu_q, cu_k = _cumulative((len(q),), q.device), _cumulative((len(k),), q.device)
        out, lse, seed, offset = _forward(q, k, v, cu_q, cu_k, _longest((len(q),)), len(k), scale, None)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        grad, n_q = grads[0].contiguous(), len(q)
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        for low, high, causal in key_blocks(n_q, len(k), BLOCK):
            cu_q, cu_k = _cumulative((n_q,), q.device), _cumulative((high - low,), q.device)
            part, _, _ = torch.ops.aten._flash_attention_backward(
                grad, *(dense_rows(x) for x in (q, k[low:high], v[low:high])), out, lse, cu_q, cu_k,
                _longest((n_q,)), high - low, 0.0, causal, seed, offset, scale=ctx.scale,
            )  # fmt: skip
            dq += part
        return dq.to(q.dtype), None, None, None


def key_blocks(n_q: int, n_k: int, block: int) -> list[tuple[int, int, bool]]:
    """Blocks (low, high, causal) of a segment's keys: every query sees all of each but the last, causal one.

    The last one has the n_q keys around the diagonal and so is bottom-right aligned by itself.
    """
    diagonal = (n_k - n_q) // block * block
    return [(low, low + block, False) for low in range(0, diagonal, block)] + [(diagonal, n_k, True)]
