"""Triton kernels of `kernels.fused_layer`, and their launches.

Shapes: as there.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 4
"""Heads that one program rotates."""
_COLUMNS = 1024
"""Columns of one SwiGLU program."""


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, add_ptr, weight_ptr, sum_ptr, normed_ptr, x_n, add_n, eps, E: tl.constexpr, WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """One row: sum (rounded as it is stored) and norm."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    keep = at < E
    x = tl.load(x_ptr + row * x_n + at, mask=keep, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        x += tl.load(add_ptr + row * add_n + at, mask=keep, other=0.0).to(tl.float32)
        x = x.to(dtype)
        tl.store(sum_ptr + row * E + at, x, mask=keep)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    weight = tl.load(weight_ptr + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * E + at, (x * scale * weight).to(dtype), mask=keep)


@triton.jit
def _rotate_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, qkv_n, rope_n, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """A few heads of one row, in place."""
    half: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    inside = dim < half
    keep = (head < H + G)[:, None] & inside[None, :]
    at = qkv_ptr + row * qkv_n + head[:, None] * D + dim[None, :]
    low = tl.load(at, mask=keep, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), tl.load(at + half, mask=keep, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        query = (head < H)[:, None]
        q_low = tl.load(q_weight_ptr + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_weight_ptr + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_weight_ptr + half + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_weight_ptr + half + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        low = low * scale * tl.where(query, q_low, k_low)
        high = high * scale * tl.where(query, q_high, k_high)
    angle = row * rope_n + dim
    cos_low = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(at, (low * cos_low - high * sin_low).to(dtype), mask=keep)
    tl.store(at + half, (high * cos_high + low * sin_high).to(dtype), mask=keep)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, x_n, size: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = at < size
    gate = tl.load(x_ptr + row * x_n + at, mask=keep, other=0.0)
    up = tl.load(x_ptr + row * x_n + size + at, mask=keep, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out_ptr + row * size + at, (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype), mask=keep)


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, slot_ptr, k_b, k_g, k_t, v_b, v_g, v_t, ko_b, ko_g, ko_s, vo_b, vo_g,
    vo_s, T, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All KV heads of one new row."""
    b = (tl.program_id(0) // T).to(tl.int64)
    t = (tl.program_id(0) % T).to(tl.int64)
    slot = tl.load(slot_ptr + b).to(tl.int64) + t
    head, dim = tl.arange(0, HEADS).to(tl.int64)[:, None], tl.arange(0, WIDTH)[None, :]
    keep = (head < G) & (dim < D)
    k = tl.load(k_ptr + b * k_b + head * k_g + t * k_t + dim, mask=keep)
    tl.store(k_out_ptr + b * ko_b + head * ko_g + slot * ko_s + dim, k, mask=keep)
    v = tl.load(v_ptr + b * v_b + head * v_g + t * v_t + dim, mask=keep)
    tl.store(v_out_ptr + b * vo_b + head * vo_g + slot * vo_s + dim, v, mask=keep)


def add_rms_norm(x_NE: Tensor, add_NE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.fused_layer.add_rms_norm`."""
    N, E = x_NE.shape
    normed_NE = x_NE.new_empty(N, E)
    sum_NE = x_NE if add_NE is None else x_NE.new_empty(N, E)
    add = x_NE if add_NE is None else _rows(add_NE)
    with _on(x_NE):
        _add_rms_norm_kernel[(N,)](
            x_NE, add, weight_E, sum_NE, normed_NE, x_NE.stride(0), add.stride(0), eps,
            E=E, WIDTH=triton.next_power_of_2(E), ADD=add_NE is not None, num_warps=8,
        )  # fmt: skip
    return sum_NE, normed_NE


def rotate_heads(
    qkv_NHD: Tensor,
    rope: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Queries and keys of `qkv_NHD`, in place; see `kernels.fused_layer.rotate_heads`."""
    cos, sin = (_rows(part) for part in rope)
    N, _, D = qkv_NHD.shape
    q_weight, k_weight = norms or (cos, cos)
    with _on(qkv_NHD):
        _rotate_kernel[(N, triton.cdiv(sum(heads), _HEADS))](
            qkv_NHD, cos, sin, q_weight, k_weight, qkv_NHD.stride(0), cos.stride(0), eps,
            H=heads[0], G=heads[1], D=D, HALF=triton.next_power_of_2(D // 2), HEADS=_HEADS,
            NORM=norms is not None, num_warps=2,
        )  # fmt: skip


def swiglu(gate_up_NX: Tensor) -> Tensor:
    """See `kernels.fused_layer.swiglu`."""
    N, size = gate_up_NX.shape[0], gate_up_NX.shape[1] // 2
    out_NI = gate_up_NX.new_empty(N, size)
    with _on(gate_up_NX):
        _swiglu_kernel[(N, triton.cdiv(size, _COLUMNS))](
            gate_up_NX, out_NI, gate_up_NX.stride(0), size=size, COLUMNS=_COLUMNS
        )
    return out_NI


def write_rows(k_BGTD: Tensor, v_BGTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, slot_B: Tensor) -> None:
    """See `kernels.fused_layer.write_rows`."""
    B, G, T, D = k_BGTD.shape
    with _on(k_BGTD):
        _write_kernel[(B * T,)](
            k_BGTD, v_BGTD, k_BGSD, v_BGSD, slot_B, *k_BGTD.stride()[:3], *v_BGTD.stride()[:3],
            *k_BGSD.stride()[:3], *v_BGSD.stride()[:3], T,
            G=G, D=D, HEADS=triton.next_power_of_2(G), WIDTH=triton.next_power_of_2(D),
        )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """The kernels want the last dim contiguous and nothing else."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _on(x: Tensor) -> AbstractContextManager[None]:
    """Launches go to the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()  # type: ignore[return-value]
