"""Triton kernel of `kernels.hier_quant`: a program turns 128 rows of K and V of one head into a block.

Formula: see `kernels.hier_quant_reference.quantise`; the operations are the same, one by one, so that codes,
steps and zeros are equal bit for bit (products and sums must not be fused).
Shapes: C = 128 tokens of a block, D head dim, X = D / 2.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

_LEAST_STEP = tl.constexpr(2.0**-14)


@triton.jit
def _swap(i):
    """Positions whose middle two of each four have changed places (`BYTE_ORDER`)."""
    return (i & ~3) | ((i & 1) << 1) | ((i >> 1) & 1)


@triton.jit
def _down(x):
    """The largest fp16 number that is not above x."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    below = (bits + tl.where(bits < 0, 1, -1).to(tl.int16)).to(tl.float16, bitcast=True)
    return tl.where(near.to(tl.float32) > x, below, near)


@triton.jit
def _up(x):
    """The smallest fp16 number that is not below x, x >= 0."""
    near = x.to(tl.float16)
    above = (near.to(tl.int16, bitcast=True) + 1).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(near.to(tl.float32) < x, above, near)


@triton.jit
def _scale(low, high, FLOOR: tl.constexpr):
    """Step and zero in fp16."""
    zero = _down(low)
    span = high - zero.to(tl.float32)
    if FLOOR:
        span *= 1.0 / 15.9375
    else:
        span *= 1.0 / 15.0
    step = _up(span)
    return tl.where(step < _LEAST_STEP, _LEAST_STEP, step).to(tl.float16), zero


@triton.jit
def _codes(x, step, zero, FLOOR: tl.constexpr):
    """Upper and lower nibbles of values whose steps and zeros are given in fp32, as integers."""
    per_step = tl.math.div_rn(1.0, step)
    if FLOOR:
        code = tl.floor((x - zero) * (per_step * 16.0) + 0.5)
        code = tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.int32)
        return code >> 4, code & 15
    upper = tl.floor((x - zero) * per_step + 0.5)
    upper = tl.minimum(tl.maximum(upper, 0.0), 15.0)
    lower = tl.floor((x - (zero + step * upper)) * (per_step * 16.0) + 0.5)
    lower = tl.minimum(tl.maximum(lower, -8.0), 7.0) + 8.0
    return upper.to(tl.int32), lower.to(tl.int32)


@triton.jit
def _keys(
    at,
    n_stride,
    block,
    u_ptr,
    l_ptr,
    step_ptr,
    zero_ptr,
    D: tl.constexpr,
    C: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """A block of keys: rows along tokens, a step and a zero for each channel."""
    X: tl.constexpr = D // 2
    half, token = tl.arange(0, X), tl.arange(0, C)
    dim = _swap(half)
    at += token[:, None] * n_stride + dim[None, :]
    near, far = tl.load(at).to(tl.float32), tl.load(at + X).to(tl.float32)
    near_step, near_zero = _scale(tl.min(near, 0), tl.max(near, 0), FLOOR)
    far_step, far_zero = _scale(tl.min(far, 0), tl.max(far, 0), FLOOR)
    meta = block * D + dim
    tl.store(step_ptr + meta, near_step)
    tl.store(zero_ptr + meta, near_zero)
    tl.store(step_ptr + meta + X, far_step)
    tl.store(zero_ptr + meta + X, far_zero)
    near_u, near_l = _codes(near, near_step.to(tl.float32)[None, :], near_zero.to(tl.float32)[None, :], FLOOR)
    far_u, far_l = _codes(far, far_step.to(tl.float32)[None, :], far_zero.to(tl.float32)[None, :], FLOOR)
    byte = block * (C * X) + token[:, None] * X + half[None, :]
    tl.store(u_ptr + byte, (near_u | (far_u << 4)).to(tl.uint8))
    tl.store(l_ptr + byte, (near_l | (far_l << 4)).to(tl.uint8))


@triton.jit
def _values(
    at,
    n_stride,
    block,
    u_ptr,
    l_ptr,
    step_ptr,
    zero_ptr,
    D: tl.constexpr,
    C: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """A block of values: rows along half a head, a step and a zero for each token."""
    X: tl.constexpr = D // 2
    half, token = tl.arange(0, X), tl.arange(0, C)
    swapped = _swap(token)
    at += swapped[None, :] * n_stride + half[:, None]
    near, far = tl.load(at).to(tl.float32), tl.load(at + X).to(tl.float32)
    low = tl.minimum(tl.min(near, 0), tl.min(far, 0))
    high = tl.maximum(tl.max(near, 0), tl.max(far, 0))
    step, zero = _scale(low, high, FLOOR)
    meta = block * C + swapped
    tl.store(step_ptr + meta, step)
    tl.store(zero_ptr + meta, zero)
    wide_step, wide_zero = step.to(tl.float32)[None, :], zero.to(tl.float32)[None, :]
    near_u, near_l = _codes(near, wide_step, wide_zero, FLOOR)
    far_u, far_l = _codes(far, wide_step, wide_zero, FLOOR)
    byte = block * (C * X) + half[:, None] * C + token[None, :]
    tl.store(u_ptr + byte, (near_u | (far_u << 4)).to(tl.uint8))
    tl.store(l_ptr + byte, (near_l | (far_l << 4)).to(tl.uint8))


@triton.jit
def quantise_kernel(
    k_ptr, v_ptr, ku_ptr, kl_ptr, vu_ptr, vl_ptr, ks_ptr, kz_ptr, vs_ptr, vz_ptr, first_ptr, count_ptr,
    k_l, k_b, k_g, k_n, v_l, v_b, v_g, v_n, B, G, N,
    D: tl.constexpr, C: tl.constexpr, RING: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Program (i, x, 0 or 1): keys or values of block `first[b] + i` of head x = (layer, sequence, KV head).

    Its rows lie at 128 i of the source, or, with RING slots, where the ring holds the block. Where i is not
    below count[b] there is nothing to do.
    """
    i, x = tl.program_id(0), tl.program_id(1)
    layer, b, g = (x // (B * G)).to(tl.int64), (x // G % B).to(tl.int64), (x % G).to(tl.int64)
    if i >= tl.load(count_ptr + b):
        return
    n = tl.load(first_ptr + b) + i
    row = ((n % (RING // C)) if RING > 0 else i).to(tl.int64) * C
    block = x.to(tl.int64) * N + n
    if tl.program_id(2) == 0:
        at = k_ptr + layer * k_l + b * k_b + g * k_g + row * k_n
        _keys(at, k_n, block, ku_ptr, kl_ptr, ks_ptr, kz_ptr, D, C, FLOOR)
    else:
        at = v_ptr + layer * v_l + b * v_b + g * v_g + row * v_n
        _values(at, v_n, block, vu_ptr, vl_ptr, vs_ptr, vz_ptr, D, C, FLOOR)
