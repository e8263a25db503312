"""Triton kernel that quantises, and its launch: a program writes K or V of 128 tokens of one head.

Formula: see `reference.quantise`. The operations are the same, one by one, so that codes, steps and zeros are
equal bit for bit (products and sums must not be fused).

Shapes: C = 128 tokens of a block, D head dim, X = D / 2.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longtrain.kernels.devices import launched_on
from longtrain.kernels.hierarchical.layout import BLOCK, Planes, Split

WARPS = {Split.FLOOR: 2, Split.RTN: 4}
"""Warps of a program. Fewer warps exchange less data; RTN's second rounding needs the registers of more."""
CHANNELS = 64
"""Key channels of a program; its registers grow with them."""
_LEAST_STEP = tl.constexpr(2.0**-14)


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
def _scale(low, high, sound, FLOOR: tl.constexpr):
    """Step and zero in fp16; NaN if the tile has NaN or infinite numbers."""
    zero = _down(tl.where(sound, low, float("nan")))
    span = high - zero.to(tl.float32)
    if FLOOR:
        span *= 1.0 / 15.9375
    else:
        span *= 1.0 / 15.0
    step = _up(span)
    return tl.where(step < _LEAST_STEP, _LEAST_STEP, step).to(tl.float16), zero


@triton.jit
def _sound(near, far):
    """True if a tile has no NaN, which minimum and maximum would skip, and no infinite numbers."""
    return tl.abs(tl.sum(tl.sum(near + far, 0), 0)) < float("inf")


@triton.jit
def _codes(x, step, zero, FLOOR: tl.constexpr):
    """Upper and lower nibbles of values, as integers; steps and zeros are given in fp32.

    The sum of 2^23 and y has y, rounded to an integer, in its last bits. Only RTN's lower nibble needs a
    clamp: the zero is not above the group's minimum, and 15 steps (or 255 codes) reach its maximum.
    """
    per_step = tl.math.div_rn(1.0, step)
    if FLOOR:
        code = ((x - zero) * (per_step * 16.0) + 8388608.0).to(tl.int32, bitcast=True)
        return (code >> 4) & 15, code & 15
    upper = (x - zero) * per_step + 8388608.0
    lower = (x - (zero + step * (upper - 8388608.0))) * (per_step * 16.0)
    lower = tl.minimum(lower, 7.0) + 8388616.0
    return upper.to(tl.int32, bitcast=True) & 15, lower.to(tl.int32, bitcast=True) & 15


@triton.jit
def _bytes(near, far, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Two nibbles per byte, in the byte order of the layout (`BYTE_ORDER`)."""
    byte = (near | (far << 4)).to(tl.uint8).reshape(ROWS, COLUMNS // 4, 2, 2)
    return byte.permute(0, 1, 3, 2).reshape(ROWS, COLUMNS)


@triton.jit
def _keys(
    at, n_stride, block, part, u_ptr, l_ptr, step_ptr, zero_ptr,
    D: tl.constexpr, C: tl.constexpr, FLOOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Quantise some channels of a block of keys, [C tokens, WIDTH channels]; step and zero by channel."""
    X: tl.constexpr = D // 2
    WIDTH: tl.constexpr = X // PARTS
    half, token = part * WIDTH + tl.arange(0, WIDTH), tl.arange(0, C)
    at += token[:, None] * n_stride + half[None, :]
    near, far = tl.load(at).to(tl.float32), tl.load(at + X).to(tl.float32)
    sound = _sound(near, far)
    near_step, near_zero = _scale(tl.min(near, 0), tl.max(near, 0), sound, FLOOR)
    far_step, far_zero = _scale(tl.min(far, 0), tl.max(far, 0), sound, FLOOR)
    meta = block * D + half
    tl.store(step_ptr + meta, near_step)
    tl.store(zero_ptr + meta, near_zero)
    tl.store(step_ptr + meta + X, far_step)
    tl.store(zero_ptr + meta + X, far_zero)
    near_u, near_l = _codes(near, near_step.to(tl.float32)[None, :], near_zero.to(tl.float32)[None, :], FLOOR)
    far_u, far_l = _codes(far, far_step.to(tl.float32)[None, :], far_zero.to(tl.float32)[None, :], FLOOR)
    byte = block * (C * X) + token[:, None] * X + half[None, :]
    tl.store(u_ptr + byte, _bytes(near_u, far_u, C, WIDTH))
    tl.store(l_ptr + byte, _bytes(near_l, far_l, C, WIDTH))


@triton.jit
def _values(
    at, n_stride, block, part, u_ptr, l_ptr, step_ptr, zero_ptr,
    D: tl.constexpr, C: tl.constexpr, FLOOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Quantise some tokens of a block of values, [X dimensions, WIDTH tokens]; step and zero by token."""
    X: tl.constexpr = D // 2
    WIDTH: tl.constexpr = C // PARTS
    half, token = tl.arange(0, X), part * WIDTH + tl.arange(0, WIDTH)
    at += token[None, :] * n_stride + half[:, None]
    near, far = tl.load(at).to(tl.float32), tl.load(at + X).to(tl.float32)
    low, high = tl.min(tl.minimum(near, far), 0), tl.max(tl.maximum(near, far), 0)
    step, zero = _scale(low, high, _sound(near, far), FLOOR)
    meta = block * C + token
    tl.store(step_ptr + meta, step)
    tl.store(zero_ptr + meta, zero)
    wide_step, wide_zero = step.to(tl.float32)[None, :], zero.to(tl.float32)[None, :]
    near_u, near_l = _codes(near, wide_step, wide_zero, FLOOR)
    far_u, far_l = _codes(far, wide_step, wide_zero, FLOOR)
    byte = block * (C * X) + half[:, None] * C + token[None, :]
    tl.store(u_ptr + byte, _bytes(near_u, far_u, X, WIDTH))
    tl.store(l_ptr + byte, _bytes(near_l, far_l, X, WIDTH))


@triton.jit
def quantise_kernel(
    k_ptr, v_ptr, ku_ptr, kl_ptr, vu_ptr, vl_ptr, ks_ptr, kz_ptr, vs_ptr, vz_ptr, first_ptr, count_ptr,
    k_l, k_b, k_g, k_n, v_l, v_b, v_g, v_n, B, G, N,
    D: tl.constexpr, C: tl.constexpr, RING: tl.constexpr, FLOOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Quantise a part of block `first[b] + i` of one head: keys for even z, values for odd z.

    Program (i, x, z) has the head x = (layer, sequence, KV head). Its tokens are at 128 i of the source or,
    for a ring of RING positions, at the block's position in the ring. A program with i >= count[b] returns at
    once.
    """
    i, x = tl.program_id(0), tl.program_id(1)
    layer, b, g = (x // (B * G)).to(tl.int64), (x // G % B).to(tl.int64), (x % G).to(tl.int64)
    if i >= tl.load(count_ptr + b):
        return
    n = tl.load(first_ptr + b) + i
    row = ((n % (RING // C)) if RING > 0 else i).to(tl.int64) * C
    block = x.to(tl.int64) * N + n
    part = tl.program_id(2) // 2
    if tl.program_id(2) % 2 == 0:
        at = k_ptr + layer * k_l + b * k_b + g * k_g + row * k_n
        _keys(at, k_n, block, part, ku_ptr, kl_ptr, ks_ptr, kz_ptr, D, C, FLOOR, PARTS)
    else:
        at = v_ptr + layer * v_l + b * v_b + g * v_g + row * v_n
        _values(at, v_n, block, part, vu_ptr, vl_ptr, vs_ptr, vz_ptr, D, C, FLOOR, PARTS)


def quantise(
    k_LBGND: Tensor,
    v_LBGND: Tensor,
    planes: Planes,
    first_B: Tensor,
    count_B: Tensor,
    *,
    blocks: int,
    ring: int,
) -> None:
    """Launch programs for keys and values of each head and block.

    Args:
        k_LBGND: keys of the source.
        v_LBGND: values of the same tokens.
        planes: planes of as many layers as the source; for one layer with or without L.
        first_B: index of the block for a sequence's first 128 tokens, int64.
        count_B: number of blocks of each sequence, int64.
        blocks: largest count.
        ring: positions of the source if it is a ring, else 0.
    """
    L, B, G, _, D = k_LBGND.shape
    parts = D // CHANNELS
    with launched_on(k_LBGND):
        quantise_kernel[(blocks, L * B * G, 2 * parts)](
            k_LBGND, v_LBGND, planes.k_upper, planes.k_lower, planes.v_upper, planes.v_lower,
            planes.k_step, planes.k_zero, planes.v_step, planes.v_zero, first_B, count_B,
            *k_LBGND.stride()[:4], *v_LBGND.stride()[:4], B, G, planes.k_step.shape[-2],
            D=D, C=BLOCK, RING=ring, FLOOR=planes.split is Split.FLOOR, PARTS=parts,
            num_warps=WARPS[planes.split], num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
