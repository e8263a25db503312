"""The Triton kernels of `kernels.own_keys`: a program for a block of queries and one head.

Shapes: as in `kernels.own_keys`; TILE queries of a program, WIDTH columns (the head dim rounded up).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "T"])
def _merge_kernel(
    q_ptr, out_ptr, lse_ptr, k_ptr, v_ptr, seen_ptr, new_out_ptr, new_lse_ptr,
    scale, q_t, q_h, out_t, out_h, lse_t, lse_h, M, T, H, G,
    D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One query head: an online softmax over its own keys that starts from the attention computed before."""
    head = tl.program_id(1)
    group = head // (H // G)
    t = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    d = tl.arange(0, WIDTH)
    row = t < T
    inside = row[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + t[:, None] * q_t + head * q_h + d[None, :], mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + t[:, None] * out_t + head * out_h + d[None, :], mask=inside, other=0.0)
    out = out.to(tl.float32)
    top = tl.load(lse_ptr + t * lse_t + head * lse_h, mask=row, other=0.0).to(tl.float32)
    total = tl.full((TILE,), 1.0, tl.float32)
    for m in range(M):
        at = ((m * T + t[:, None]) * G + group) * D + d[None, :]
        k = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(q * k, 1) * scale
        if MASKED:
            seen = tl.load(seen_ptr + m * T + t, mask=row, other=0)
            score = tl.where(seen != 0, score, float("-inf"))
        new = tl.maximum(top, score)
        less, weight = tl.exp(top - new), tl.exp(score - new)
        out = out * less[:, None] + v * weight[:, None]
        total = total * less + weight
        top = new
    out = out / total[:, None]
    at = (t[:, None] * H + head) * D + d[None, :]
    tl.store(new_out_ptr + at, out.to(new_out_ptr.dtype.element_ty), mask=inside)
    tl.store(new_lse_ptr + t * H + head, top + tl.log(total), mask=row)


@triton.jit(do_not_specialize=["M", "T"])
def _queries_kernel(
    grad_ptr, q_ptr, out_ptr, lse_ptr, k_ptr, v_ptr, seen_ptr, dq_ptr, new_dq_ptr,
    scale, grad_t, grad_h, q_t, q_h, out_t, out_h, dq_t, dq_h, M, T, H, G,
    D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradient of one query head."""
    head = tl.program_id(1)
    group = head // (H // G)
    t = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    d = tl.arange(0, WIDTH)
    row = t < T
    inside = row[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + t[:, None] * q_t + head * q_h + d[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + t[:, None] * grad_t + head * grad_h + d[None, :], mask=inside, other=0.0)
    grad = grad.to(tl.float32)
    out = tl.load(out_ptr + t[:, None] * out_t + head * out_h + d[None, :], mask=inside, other=0.0)
    delta = tl.sum(grad * out.to(tl.float32), 1)
    dq = tl.load(dq_ptr + t[:, None] * dq_t + head * dq_h + d[None, :], mask=inside, other=0.0)
    dq = dq.to(tl.float32)
    lse = tl.load(lse_ptr + t * H + head, mask=row, other=0.0)
    for m in range(M):
        at = ((m * T + t[:, None]) * G + group) * D + d[None, :]
        k = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * k, 1) * scale - lse)
        if MASKED:
            seen = tl.load(seen_ptr + m * T + t, mask=row, other=0)
            weight = tl.where(seen != 0, weight, 0.0)
        slope = weight * (tl.sum(grad * v, 1) - delta) * scale
        dq += slope[:, None] * k
    at = (t[:, None] * H + head) * D + d[None, :]
    tl.store(new_dq_ptr + at, dq.to(new_dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _keys_kernel(
    grad_ptr, q_ptr, out_ptr, lse_ptr, k_ptr, v_ptr, seen_ptr, dk_ptr, dv_ptr,
    scale, grad_t, grad_h, q_t, q_h, out_t, out_h, T, H, G,
    D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradients of one own key and value of one KV head, summed over its query heads."""
    group, m = tl.program_id(1), tl.program_id(2)
    t = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    d = tl.arange(0, WIDTH)
    row = t < T
    inside = row[:, None] & (d < D)[None, :]
    at = ((m * T + t[:, None]) * G + group) * D + d[None, :]
    k = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dk = tl.zeros((TILE, WIDTH), tl.float32)
    dv = tl.zeros((TILE, WIDTH), tl.float32)
    for head in range(group * (H // G), (group + 1) * (H // G)):
        q = tl.load(q_ptr + t[:, None] * q_t + head * q_h + d[None, :], mask=inside, other=0.0)
        q = q.to(tl.float32)
        grad = tl.load(grad_ptr + t[:, None] * grad_t + head * grad_h + d[None, :], mask=inside, other=0.0)
        grad = grad.to(tl.float32)
        out = tl.load(out_ptr + t[:, None] * out_t + head * out_h + d[None, :], mask=inside, other=0.0)
        delta = tl.sum(grad * out.to(tl.float32), 1)
        lse = tl.load(lse_ptr + t * H + head, mask=row, other=0.0)
        weight = tl.exp(tl.sum(q * k, 1) * scale - lse)
        if MASKED:
            seen = tl.load(seen_ptr + m * T + t, mask=row, other=0)
            weight = tl.where(seen != 0, weight, 0.0)
        slope = weight * (tl.sum(grad * v, 1) - delta) * scale
        dk += slope[:, None] * q
        dv += weight[:, None] * grad
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)
