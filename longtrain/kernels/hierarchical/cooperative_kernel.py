"""Triton kernel of hierarchical attention at 8 bits for up to 32 packed rows and heads of 128: four warps.

The formulas are those of `attention_kernel`. As in `fragments_kernel` tensors are laid out by hand and blocks
are unpacked in registers, but here four warps share a block: each has all rows' scores with 32 of its tokens,
and then all rows' sums of 32 of the head's dimensions, so that a code is unpacked once for all rows. A tensor
of 16 registers a thread is flat, [4 k, 4 w, 8 g, 4 t, 4 c]: warp w's thread 4 g + t has in register 4 k + c

    keys      bytes 16 t + 4 c .. of the token 32 w + 8 (g / 2) + 2 k + g mod 2
    q         of row 16 (w mod 2) + 8 (c mod 2) + g, key channels 64 (w / 2) + 16 t + 4 k + 2 (c / 2) ..
    steps     of key channels 64 (w / 2) + 16 t + 8 (k mod 2) + 2 c and the next, as are zeros
    numbers   of the tokens 32 w + 8 t + 2 c and the next, for every k
    values    tokens 32 t + 16 (k mod 2) + 4 c .. of the dimension 16 w + 8 (k / 2) + g (and + 64)
    state     of row 8 c + g, by k: maximum, the thread's sums of weights and of weights times zeros, a factor
    sums      of the dimension 16 w + 8 (c / 2) + g (sums A; B: + 64), row 8 k + 2 t + c mod 2

`cooperative_ptx` says what happens to a block. Nothing of a row's result depends on other rows, nor on the
number of tiles.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.hierarchical.fragments_kernel import _PREFETCH, _halves, _place, _ring

_RING = tl.constexpr(384)
_BLOCK = tl.constexpr(128)


@triton.jit
def _words(plane_ptr, at, offset):
    """Words of a plane's block, four of a thread at consecutive addresses."""
    words = plane_ptr.to(tl.pointer_type(tl.int32)) + at
    return tl.load(tl.max_contiguous(tl.multiple_of(words + offset, 16), 4))


@triton.jit
def _channels(words):
    """Words of two channels in the threads that need them: [w / 2, t, k mod 2, c] to registers."""
    x = tl.permute(tl.reshape(words, (2, 4, 2, 4)), (2, 0, 1, 3))
    x = tl.broadcast_to(tl.reshape(x, (1, 2, 2, 1, 4, 4)), (2, 2, 2, 16, 4, 4))
    return tl.reshape(x, (2048,))


@triton.jit
def _tokens(words):
    """Words of two tokens likewise: [w, t, c]."""
    x = tl.reshape(words, (1, 4, 1, 4, 4))
    return tl.reshape(tl.broadcast_to(x, (4, 4, 8, 4, 4)), (2048,))


@triton.jit
def _queries(word, BF16: tl.constexpr):
    """Queries as words of two fp16 numbers, and the powers of two that their rows are divided by: [8 g, 4 c].

    Queries of 8 or 11 bits stay as they are, and are divided by 16 more as codes are 16 times too large.
    """
    even, odd = _halves(word, BF16)
    most = tl.reshape(tl.maximum(tl.abs(even), tl.abs(odd)), (4, 2, 2, 8, 4, 2, 2))
    most = tl.max(tl.max(tl.max(tl.max(most, 5), 4), 1), 0)  # [2 w % 2, 8 g, 2 c % 2]
    norm = tl.exp2(tl.ceil(tl.log2(tl.maximum(most, 1e-30))))
    by = tl.reshape(0.0625 / norm, (1, 1, 2, 8, 1, 1, 2))
    by = tl.reshape(tl.broadcast_to(by, (4, 2, 2, 8, 4, 2, 2)), (2048,))
    low = (even * by).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = (odd * by).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    norm = tl.reshape(tl.permute(norm, (1, 0, 2)), (8, 4))
    return (low | (high << 16)).to(tl.int32, bitcast=True), norm


@triton.jit
def _of_sums(x):
    """Numbers of 32 rows, [8, 4], where the rows' sums are."""
    x = tl.reshape(tl.permute(tl.reshape(x, (4, 2, 4)), (2, 0, 1)), (4, 1, 1, 4, 1, 2))
    return tl.reshape(tl.broadcast_to(x, (4, 4, 8, 4, 2, 2)), (2048,))


@triton.jit
def _part(state, PART: tl.constexpr):
    """A part of the state: [8 g, 4 c]."""
    part = tl.arange(0, 4)[:, None, None]
    return tl.sum(tl.where(part == PART, state, 0.0), 0)


@triton.jit(do_not_specialize=["splits", "T", "N", "ahead"])
def attend_kernel(
    q_ptr, k_upper_ptr, k_lower_ptr, v_upper_ptr, v_lower_ptr, k_step_ptr, k_zero_ptr, v_step_ptr, v_zero_ptr,
    ring_k_ptr, ring_v_ptr, len_ptr, blocks_ptr, bits_ptr, out_ptr, lse_ptr, scale2, splits, T, N, ahead,
    q_b, q_h, q_t, bits_b, bits_t,
    G: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr,
    MASK: tl.constexpr, WORDS: tl.constexpr, RECENT: tl.constexpr, RINGS: tl.constexpr, STAGES: tl.constexpr,
    WEIGHTS: tl.constexpr, WEIGHTS_OF: tl.constexpr, VALUES: tl.constexpr, VALUES_OF: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Partial out [ROWS, 128], base-2 lse [ROWS] of all packed rows over a split of the ring or the blocks.

    The first RINGS splits take tiles of the ring in turn, the others equal shares of the blocks.

    `ahead`: blocks of a program that are brought to the L2 cache before the kernel in front has ended.
    """
    D: tl.constexpr = 128
    BLOCK: tl.constexpr = 2048
    pid, split = tl.program_id(0), tl.program_id(1)
    b, kv, head = pid // G, pid % G, pid.to(tl.int64)
    row = head * N
    if CHAINED:
        if split >= RINGS and ahead > 0:
            count = tl.load(blocks_ptr + b).to(tl.int32)
            ours = tl.cdiv(count, splits - RINGS)
            start = (split - RINGS) * ours
            size = tl.maximum(tl.minimum(tl.minimum(ours, ahead), count - start), 0) * (4 * BLOCK)
            into = (row + start).to(tl.int64) * (4 * BLOCK)
            plane = tl.arange(0, 128)
            at = tl.where(plane == 0, k_upper_ptr.to(tl.int64), v_upper_ptr.to(tl.int64))
            lower = tl.where(plane == 2, k_lower_ptr.to(tl.int64), v_lower_ptr.to(tl.int64))
            at = tl.where(plane < 2, at, lower)
            tl.inline_asm_elementwise(
                _PREFETCH, "=r,l,r", [at + into, tl.where(plane < 4, size, 0)], dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip
        gdc_wait()
    blocks = tl.load(blocks_ptr + b, cache_modifier=".cg").to(tl.int32)
    share = tl.cdiv(blocks, splits - RINGS)
    first = (split - RINGS) * share
    last = tl.minimum(first + share, blocks)
    slot = (pid * splits + split).to(tl.int64) * ROWS
    q_head = q_ptr + b.to(tl.int64) * q_b + (kv * GROUP).to(tl.int64) * q_h
    if split < RINGS:
        dim = tl.arange(0, D)
        n, begin = tl.load(len_ptr + b).to(tl.int32), blocks * _BLOCK
        end = n + T if MASK else n
        m = tl.arange(0, ROWS)
        query, member, exists = m // GROUP, m % GROUP, m < T * GROUP
        low_bits, high_bits = query.to(tl.int64), query.to(tl.int64)
        if MASK == 2:
            bits_at = bits_ptr + b.to(tl.int64) * bits_b + query.to(tl.int64) * bits_t
            low_bits = tl.load(bits_at, mask=exists, other=0)
            if WORDS == 2:
                high_bits = tl.load(bits_at + 1, mask=exists, other=0)
        top, total, out = _ring(
            q_head + member.to(tl.int64) * q_h + query.to(tl.int64) * q_t, exists, ring_k_ptr, ring_v_ptr,
            head * _RING, n, begin, end, split, query, low_bits, high_bits, T, scale2,
            D, ROWS, MASK, WORDS, RECENT, RINGS,
        )  # fmt: skip
        if CHAINED:
            gdc_launch_dependents()
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(lse_ptr + slot + m, top + tl.log2(total), mask=exists)
        tl.store(out_ptr + slot * D + _place(m[:, None], dim[None, :]), out, mask=exists[:, None])
    elif first < last:
        e = tl.arange(0, BLOCK)
        c, t, g, w, k = e & 3, (e >> 2) & 3, (e >> 4) & 7, (e >> 7) & 3, e >> 9
        packed = 16 * (w & 1) + 8 * (c & 1) + g
        q_at = 32 * (w >> 1) + 8 * t + 2 * k + (c >> 1)
        q_at += (packed % GROUP).to(tl.int64) * (q_h // 2) + (packed // GROUP).to(tl.int64) * (q_t // 2)
        word = tl.load(q_head.to(tl.pointer_type(tl.uint32)) + q_at, mask=packed < T * GROUP, other=0)
        q, norm = _queries(word, q_ptr.dtype.element_ty == tl.bfloat16)
        norm = tl.broadcast_to(tl.reshape(norm * scale2 * 2.0**24, (1, 1, 8, 1, 4)), (4, 4, 8, 4, 4))
        norm = tl.reshape(norm, (BLOCK,))
        state = tl.where(k == 0, float("-inf"), tl.where(k == 3, norm, 0.0))
        out_a, out_b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        k_in = (32 * w + 8 * (g >> 1) + 2 * k + (g & 1)) * 16 + 4 * t + c
        v_in = (16 * w + 8 * (k >> 1) + g) * 32 + 8 * t + 4 * (k & 1) + c
        word_of = tl.arange(0, 64)
        for block in tl.range(first, last, num_stages=STAGES):
            at = (row + block).to(tl.int64) * BLOCK
            near = (row + block).to(tl.int64) * 64 + word_of
            state, more = tl.inline_asm_elementwise(
                WEIGHTS, WEIGHTS_OF,
                (
                    _words(k_upper_ptr, at, k_in), _words(k_lower_ptr, at, k_in),
                    _channels(tl.load(k_step_ptr.to(tl.pointer_type(tl.int32)) + near)),
                    _channels(tl.load(k_zero_ptr.to(tl.pointer_type(tl.int32)) + near)),
                    _tokens(tl.load(v_step_ptr.to(tl.pointer_type(tl.int32)) + near)),
                    _tokens(tl.load(v_zero_ptr.to(tl.pointer_type(tl.int32)) + near)),
                    q, state,
                ),
                dtype=(tl.float32, tl.float32), is_pure=False, pack=16,
            )  # fmt: skip
            out_a, out_b = tl.inline_asm_elementwise(
                VALUES, VALUES_OF,
                (_words(v_upper_ptr, at, v_in), _words(v_lower_ptr, at, v_in), more, out_a, out_b),
                dtype=(tl.float32, tl.float32), is_pure=False, pack=16,
            )  # fmt: skip
        if CHAINED:
            gdc_launch_dependents()
        # of a thread's and its warp's numbers; the maximum is the same in all sixteen
        state = tl.sum(tl.sum(tl.reshape(state, (4, 4, 8, 4, 4)), 3), 1)
        total = _part(state, 1)
        m = 8 * tl.arange(0, 4)[None, :] + tl.arange(0, 8)[:, None]
        tl.store(lse_ptr + slot + m, _part(state, 0) * 0.0625 + tl.log2(total), mask=m < T * GROUP)
        by = 1.0 / tl.where(total > 0, total, 1.0)
        plus = _of_sums(_part(state, 2) * by)
        by = _of_sums(by * (0.0625 * 2.0**24))
        at = k * 1024 + (w >> 1) * 512 + (w & 1) * 256 + (g * 16 + 4 * t) + c
        at = out_ptr + slot * D + tl.max_contiguous(tl.multiple_of(at, 4), 4)
        keep = tl.max_constancy(8 * k + 2 * t < T * GROUP, 4)
        tl.store(at, out_a * by + plus, mask=keep)
        tl.store(at + 128, out_b * by + plus, mask=keep)
    else:
        none = tl.arange(0, ROWS)
        tl.store(lse_ptr + slot + none, tl.full((ROWS,), float("-inf"), tl.float32))
