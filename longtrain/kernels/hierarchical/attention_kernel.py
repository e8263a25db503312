"""Triton kernel of hierarchical attention: packed queries over 4-bit planes and the ring.

Unpacked codes u are operands of the products; steps s and zeros z (of a key channel or a value token) are
applied to the other operand and to the results:

    logit_mc = norm_m (sum_d (q_md s_d / norm_m) u_cd + beta_m)
    beta_m = sum_d q_md (z_d + offset s_d) / norm_m
    out_md = (sum_c (p_mc s_c) u_cd + sum_c p_mc (z_c + offset s_c)) / sum_c p_mc

Before its loop over blocks, a program writes beta of all of them, and finds the power of two that keeps p s
in the range of fp16. Packed rows m and partial results are as in `tree_attention.kernel`; the first split has
the ring. A code n that is masked out of a word has the bits of the subnormal fp16 number n 2^-24, which is
exact, and tensor cores process it at full speed. PORTABLE converts it to n (for the interpreter).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.tree_attention.kernel import _rows, _visible

_BLOCK = tl.constexpr(128)
_RING = tl.constexpr(384)
_FP16_EXPONENT = tl.constexpr(14.0)

_UPPER = tl.constexpr("""{
    .reg .b32 w;
    shr.u32 w, $4, 8;
    and.b32 $0, $4, 0x000F000F;
    and.b32 $1, w, 0x000F000F;
    and.b32 $2, $4, 0x00F000F0;
    and.b32 $3, w, 0x00F000F0;
}""")
_BOTH = tl.constexpr("""{
    .reg .b32 u, l;
    shl.b32 u, $4, 4;
    lop3.b32 u, $5, u, 0x0F0F0F0F, 0xE4;
    and.b32 $0, u, 0x00FF00FF;
    shr.u32 u, u, 8;
    and.b32 $1, u, 0x00FF00FF;
    shr.u32 l, $5, 4;
    lop3.b32 l, l, $4, 0x0F0F0F0F, 0xE4;
    and.b32 $2, l, 0x00FF00FF;
    shr.u32 l, l, 8;
    and.b32 $3, l, 0x00FF00FF;
}""")


@triton.jit
def _upper(codes, PORTABLE: tl.constexpr):
    """Numbers of the upper plane alone: u of the first half of a head, 16 u of the second."""
    if PORTABLE:
        low, high = (codes & 15).to(tl.float16), (codes & 240).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            _UPPER, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def _both(upper, lower, PORTABLE: tl.constexpr):
    """Numbers 16 u + l of both planes, of the first and of the second half of a head."""
    if PORTABLE:
        low = (((upper & 15) << 4) | (lower & 15)).to(tl.float16)
        high = ((upper & 240) | (lower >> 4)).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            _BOTH, "=r,=r,=r,=r,r,r", [upper, lower], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def _position(i, PORTABLE: tl.constexpr):
    """Byte index of position i: the middle two of each four are swapped."""
    if PORTABLE:
        i = tl.where(((i ^ (i >> 1)) & 1) != 0, i ^ 3, i)
    return i


@triton.jit
def _narrow(x, ROWS: tl.constexpr):
    """Sums of groups of eight numbers of a row that one thread has: no exchange between threads."""
    return tl.sum(tl.sum(tl.reshape(x, (ROWS, 4, _BLOCK // 8, 2)), 3), 1)


@triton.jit
def _narrowed(x, ROWS: tl.constexpr):
    """A row's number, in the layout of the sums of `_narrow`."""
    return tl.max(tl.max(tl.reshape(x, (ROWS, 4, _BLOCK // 8, 2)), 3), 1)


@triton.jit
def _numbers(v_step_ptr, v_zero_ptr, at, token):
    """Steps and zeros of a block's values."""
    return tl.load(v_step_ptr + at * _BLOCK + token), tl.load(v_zero_ptr + at * _BLOCK + token)


@triton.jit
def _prepare(
    q_at, exists, k_step_at, k_zero_at, v_step_at, beta_at, norm, first, last,
    D: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Write beta of the blocks first..last-1, and return the base-2 exponent of the largest allowed p."""
    dim, n, token = tl.arange(0, D), tl.arange(0, ROUND), tl.arange(0, _BLOCK)
    q = tl.load(q_at[:, None] + dim[None, :], mask=exists[:, None], other=0.0).to(tl.float32) / norm[:, None]
    m = tl.arange(0, ROWS)
    largest = 0.0
    for start in tl.range(first, last, ROUND, num_stages=1):
        block = start + n
        keep = (block < last)[:, None]
        at = block.to(tl.int64)[:, None]
        step = tl.load(k_step_at + at * D + dim[None, :], mask=keep, other=0.0).to(tl.float32)
        zero = tl.load(k_zero_at + at * D + dim[None, :], mask=keep, other=0.0).to(tl.float32)
        v_step = tl.load(v_step_at + at * _BLOCK + token[None, :], mask=keep, other=0.0).to(tl.float32)
        beta = tl.dot(q, tl.trans(zero + OFFSET * step), input_precision="tf32x3")
        tl.store(beta_at + (block * ROWS)[None, :] + m[:, None], beta, mask=(block < last)[None, :])
        largest = tl.maximum(largest, tl.max(tl.max(v_step, 1), 0))
    return _FP16_EXPONENT - tl.ceil(tl.log2(tl.maximum(largest, 1e-6)))


@triton.jit(do_not_specialize=["splits", "T", "N"])
def attend_kernel(
    q_ptr, k_upper_ptr, k_lower_ptr, v_upper_ptr, v_lower_ptr, k_step_ptr, k_zero_ptr, v_step_ptr, v_zero_ptr,
    ring_k_ptr, ring_v_ptr, len_ptr, blocks_ptr, bits_ptr, beta_ptr, out_ptr, lse_ptr, scale2, splits, T, N,
    q_b, q_h, q_t, bits_b, bits_t,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BITS: tl.constexpr, OFFSET: tl.constexpr, MASK: tl.constexpr,
    WORDS: tl.constexpr, RECENT: tl.constexpr, STAGES: tl.constexpr, PORTABLE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Partial out [ROWS, D], base-2 lse [ROWS] of a tile of rows over a split of the blocks or the ring."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    X: tl.constexpr = D // 2
    tiles = tl.cdiv(T * GROUP, ROWS)
    pid, split = tl.program_id(0), tl.program_id(1)
    b = pid // (tiles * G)
    head = (pid // tiles).to(tl.int64)
    kv = (pid // tiles) % G
    query, member, exists = _rows(pid % tiles, T, GROUP, ROWS)
    blocks = tl.load(blocks_ptr + b).to(tl.int32)
    share = tl.cdiv(blocks, splits - 1)
    first = (split - 1) * share
    last = tl.minimum(first + share, blocks)
    m, x, token = tl.arange(0, ROWS), tl.arange(0, X), tl.arange(0, _BLOCK)
    slot = (pid * splits + split).to(tl.int64) * ROWS + m
    out_at = out_ptr + slot[:, None] * D + x[None, :]
    q_at = q_ptr + b.to(tl.int64) * q_b + (kv * GROUP + member).to(tl.int64) * q_h + query.to(tl.int64) * q_t
    low = tl.load(q_at[:, None] + x[None, :], mask=exists[:, None], other=0.0)
    high = tl.load(q_at[:, None] + X + x[None, :], mask=exists[:, None], other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    out_low = tl.zeros((ROWS, X), tl.float32)
    out_high = tl.zeros((ROWS, X), tl.float32)

    if split == 0:  # the ring and the new tokens
        n, begin = tl.load(len_ptr + b).to(tl.int32), blocks * _BLOCK
        end = n + T if MASK else n
        low_bits, high_bits = query.to(tl.int64), query.to(tl.int64)
        if MASK == 2:
            bits_at = bits_ptr + b.to(tl.int64) * bits_b + query.to(tl.int64) * bits_t
            low_bits = tl.load(bits_at, mask=exists, other=0)
            if WORDS == 2:
                high_bits = tl.load(bits_at + 1, mask=exists, other=0)
        kind: tl.constexpr = ring_k_ptr.dtype.element_ty
        ring_low, ring_high = low.to(kind), high.to(kind)
        ring_total = tl.zeros((ROWS,), tl.float32)
        for start in tl.range(begin, end, RECENT, num_stages=1):
            p = start + tl.arange(0, RECENT)
            ring_at = (head * _RING + p % _RING)[:, None] * D + x[None, :]
            keep = (p < end)[:, None]
            ring_logit = tl.dot(
                ring_low,
                tl.trans(tl.load(ring_k_ptr + ring_at, mask=keep, other=0.0)),
                input_precision="ieee",
            )
            ring_k = tl.load(ring_k_ptr + ring_at + X, mask=keep, other=0.0)
            ring_logit = tl.dot(ring_high, tl.trans(ring_k), ring_logit, input_precision="ieee")
            seen = _visible(p, n, query, low_bits, high_bits, T, MASK, WORDS) & (p < end)[None, :]
            ring_logit = tl.where(seen, ring_logit, float("-inf"))
            ring_top = tl.maximum(top, tl.max(ring_logit, 1) * scale2)
            base = tl.where(ring_top == float("-inf"), 0.0, ring_top)
            ring_weight = tl.exp2(ring_logit * scale2 - base[:, None])
            fade = tl.exp2(top - base)
            ring_total = ring_total * fade + tl.sum(ring_weight, 1)
            ring_weight = ring_weight.to(kind)
            ring_v = tl.load(ring_v_ptr + ring_at, mask=keep, other=0.0)
            out_low = tl.dot(ring_weight, ring_v, out_low * fade[:, None], input_precision="ieee")
            ring_v = tl.load(ring_v_ptr + ring_at + X, mask=keep, other=0.0)
            out_high = tl.dot(ring_weight, ring_v, out_high * fade[:, None], input_precision="ieee")
            top = ring_top
        some = tl.where(ring_total > 0, ring_total, 1.0)[:, None]
        tl.store(lse_ptr + slot, top + tl.log2(ring_total), mask=exists)
        tl.store(out_at, out_low / some, mask=exists[:, None])
        tl.store(out_at + X, out_high / some, mask=exists[:, None])
    elif first < last:  # a share of the blocks; the two halves of a head (low, high) are separate operands
        q_low, q_high = low.to(tl.float32) * scale2, high.to(tl.float32) * scale2
        norm = tl.maximum(tl.max(tl.abs(q_low), 1), tl.max(tl.abs(q_high), 1))
        norm = tl.exp2(tl.ceil(tl.log2(tl.maximum(norm, 1e-30))))
        # numbers of INT8, and those of INT4's second half, are 16 times too large; all are steps of UNIT
        UNIT: tl.constexpr = 1.0 if PORTABLE else 2.0**-24
        FIRST: tl.constexpr = 0.0625 if BITS == 8 else 1.0
        a_low = (q_low / norm[:, None] * FIRST).to(tl.float16)
        a_high = (q_high / norm[:, None] * 0.0625).to(tl.float16)
        norm = norm / UNIT
        row = head * N
        beta_at = beta_ptr + pid.to(tl.int64) * N * ROWS
        lift = _prepare(
            q_at, exists, k_step_ptr + row * D, k_zero_ptr + row * D, v_step_ptr + row * _BLOCK, beta_at,
            norm / scale2, first, last, D, ROWS, OFFSET, 32 if ROWS == 16 else 16,
        )  # fmt: skip
        tl.debug_barrier()
        xp, tp = _position(x, PORTABLE), _position(token, PORTABLE)
        k_in = (token * X)[:, None] + xp[None, :]
        v_in = (x * _BLOCK)[:, None] + tp[None, :]
        v_step_next, v_zero_next = _numbers(v_step_ptr, v_zero_ptr, row + first, token)
        total = tl.zeros((ROWS, _BLOCK // 8), tl.float32)
        zeros = tl.zeros((ROWS, _BLOCK // 8), tl.float32)
        for block in tl.range(first, last, num_stages=STAGES):
            at = row + block
            v_step, v_zero = v_step_next, v_zero_next
            v_step_next, v_zero_next = _numbers(
                v_step_ptr, v_zero_ptr, tl.minimum(at + 1, row + last - 1), token
            )
            step_low = tl.load(k_step_ptr + at * D + x)
            step_high = tl.load(k_step_ptr + at * D + X + x)
            k = tl.load(k_upper_ptr + at * (_BLOCK * X) + k_in)
            if BITS == 4:
                k_low, k_high = _upper(k, PORTABLE)
            else:
                k_low, k_high = _both(k, tl.load(k_lower_ptr + at * (_BLOCK * X) + k_in), PORTABLE)
            beta = tl.load(beta_at + block * ROWS + m)
            logit = tl.dot(
                a_low * step_low[None, :], tl.trans(k_low), tl.broadcast_to(beta[:, None], (ROWS, _BLOCK))
            )
            logit = tl.dot(a_high * step_high[None, :], tl.trans(k_high), logit)
            new = tl.maximum(top, tl.max(logit, 1) * norm)
            weight = tl.exp2(logit * norm[:, None] - (new - lift)[:, None])
            shrink = tl.exp2(top - new)[:, None]
            fade = _narrowed(tl.broadcast_to(shrink, (ROWS, _BLOCK)), ROWS)
            v_step = v_step.to(tl.float32)
            v_zero = v_zero.to(tl.float32) + OFFSET * v_step
            total = total * fade + _narrow(weight, ROWS)
            zeros = zeros * fade + _narrow(weight * v_zero[None, :], ROWS)
            weight = (weight * v_step[None, :]).to(tl.float16)
            v = tl.load(v_upper_ptr + at * (_BLOCK * X) + v_in)
            if BITS == 4:
                v_low, v_high = _upper(v, PORTABLE)
            else:
                v_low, v_high = _both(v, tl.load(v_lower_ptr + at * (_BLOCK * X) + v_in), PORTABLE)
            out_low = tl.dot(weight, tl.trans(v_low), out_low * shrink)
            out_high = tl.dot(weight, tl.trans(v_high), out_high * shrink)
            top = new
        sums = tl.sum(total, 1)
        shift = (tl.sum(zeros, 1) / sums)[:, None]
        tl.store(lse_ptr + slot, top - lift + tl.log2(sums), mask=exists)
        out_low = out_low * (FIRST / UNIT) / sums[:, None] + shift
        out_high = out_high * (0.0625 / UNIT) / sums[:, None] + shift
        tl.store(out_at, out_low, mask=exists[:, None])
        tl.store(out_at + X, out_high, mask=exists[:, None])
    else:  # an empty split: lse -inf
        tl.store(lse_ptr + slot, top, mask=exists)
