"""Triton kernel of `kernels.hier_attention` for up to 16 packed rows and heads of 128: warps on their own.

The formulas are those of `hier_attention_triton`. There a program's warps share every product; here a warp
takes half a block (64 tokens) from loading it to its weighted values, and warps meet once, at the end. For
that tensors are laid out by hand. A tensor of 16 registers a thread is flat, [4 k, W warps, 8 g, 4 t, 4 c]:
register r = 4 k + c of the thread with lane 4 g + t; warp 2 p + h has half h of the p-th of the program's
blocks of a round. Those of a thread are

    keys      bytes 16 t .. 16 t + 15 of the tokens 64 h + 16 (g / 2) + 2 i + g mod 2, i = k, and k + 4
    steps     of key channels 64 (k / 2) + 16 t + 8 (k mod 2) + 2 c and the next, as are zeros and q
    scores    of row g with the tokens 64 h + 16 t + r
    values    tokens 64 h + 16 t + 4 c .. of the dimensions 8 k + g (and + 64), and those + 32
    sums      of the dimensions 64 (k mod 2) + 16 (k / 2) + g + 8 (c / 2), and those + 32, with row 2 t + c mod 2

so that a thread's loads are of 16 bytes, scores come out where the weights go in, and nothing moves between
threads but a row's maximum (four threads) and how much its sums shrink (`hier_fragments_ptx`). Rows m are as
in `tree_attention_triton`: 8 TILES of each of GROUPS groups of warps, which read the same blocks. Nothing of a
row's result depends on other rows, nor on TILES and GROUPS.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.tree_attention_triton import _rows, _visible

_BLOCK = tl.constexpr(128)
_RING = tl.constexpr(384)
_LIFT = tl.constexpr(14.0)
_LN2 = tl.constexpr(0.6931471805599453)
_PREFETCH = tl.constexpr("""{
    .reg .pred p;
    setp.ne.s32 p, $2, 0;
    @p cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}""")


@triton.jit
def _spread(x, THREADS: tl.constexpr):
    """A thread's number, or a row's of a warp's, in all registers it belongs to."""
    wide = tl.broadcast_to(x[None, :, :, None], (4, THREADS // 4, 4, 4))
    return tl.reshape(wide, (16 * THREADS,))


@triton.jit
def _sum(x, THREADS: tl.constexpr):
    return tl.sum(tl.sum(tl.reshape(x, (4, THREADS // 4, 4, 4)), 3), 0)


@triton.jit
def _max(x, THREADS: tl.constexpr):
    return tl.max(tl.max(tl.reshape(x, (4, THREADS // 4, 4, 4)), 3), 0)


@triton.jit
def _even_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of rows in one order, whatever threads hold them: neighbours first."""
    size: tl.constexpr = COLUMNS // 2
    x = tl.sum(tl.reshape(x, (ROWS, size, 2)), 2)
    if size == 1:
        return tl.reshape(x, (ROWS,))
    else:
        return _even_sum(x, ROWS, size)


@triton.jit
def _quads(at, offset, keep, GROUPS: tl.constexpr):
    """Words, four of a thread at consecutive addresses; groups have the same."""
    words = tl.load(tl.max_contiguous(tl.multiple_of(at + offset, 16), 4), mask=keep, other=0)
    if GROUPS > 1:
        SIZE: tl.constexpr = words.shape[0] // 4
        wide = tl.broadcast_to(tl.reshape(words, (4, 1, SIZE)), (4, GROUPS, SIZE))
        words = tl.reshape(wide, (4 * GROUPS * SIZE,))
    return words


@triton.jit
def _fours(at, offset, keep):
    return tl.load(tl.max_contiguous(tl.multiple_of(at + offset, 8), 4), mask=keep, other=0.0)


@triton.jit
def _channels(words, PAIRS: tl.constexpr, GROUPS: tl.constexpr):
    """Words of two channels in the threads that need them: [pair, half, t, k, c] to registers."""
    x = tl.permute(tl.reshape(words, (PAIRS, 2, 4, 2, 4)), (1, 3, 0, 2, 4))
    x = tl.broadcast_to(tl.reshape(x, (4, 1, PAIRS, 1, 4, 4)), (4, GROUPS, PAIRS, 16, 4, 4))
    return tl.reshape(x, (16 * GROUPS * PAIRS * 64,))


@triton.jit
def _tokens(numbers, PAIRS: tl.constexpr):
    """Numbers of tokens likewise: [pair, h, t, k, c]."""
    x = tl.permute(tl.reshape(numbers, (2 * PAIRS, 4, 4, 4)), (2, 0, 1, 3))
    x = tl.broadcast_to(tl.reshape(x, (4, 2 * PAIRS, 1, 4, 4)), (4, 2 * PAIRS, 8, 4, 4))
    return tl.reshape(x, (1024 * PAIRS,)).to(tl.float32)


@triton.jit
def _queries(word, k, FIRST: tl.constexpr, BF16: tl.constexpr, THREADS: tl.constexpr):
    """A thread's queries as words of two fp16 numbers, and the power of two of their row they are divided by.

    Queries of 8 or 11 bits stay as they are. Where codes are 16 times too large, queries are divided by 16.
    """
    if BF16:
        even = (word << 16).to(tl.float32, bitcast=True)
        odd = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        even = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    norm = tl.max(_max(tl.maximum(tl.abs(even), tl.abs(odd)), THREADS), 1)[:, None]
    norm = tl.exp2(tl.ceil(tl.log2(tl.maximum(norm, 1e-30))))
    by = tl.where(k < 2, FIRST, 0.0625) / _spread(norm, THREADS)
    low = (even * by).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = (odd * by).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (low | (high << 16)).to(tl.int32, bitcast=True), norm


@triton.jit
def _softened(logit, norm, v_step, v_zero, top, total, zeros, OFFSET: tl.constexpr, THREADS: tl.constexpr):
    """A step of the softmax of a tile: weights of the values' codes, and how much older sums shrink.

    A row's weights are kept below 2^14 by what their tokens' steps are, which is all that fp16 needs.
    """
    most = _max(logit, THREADS) * norm + tl.log2(_max(v_step, THREADS)) - _LIFT
    here = tl.max(most, 1)[:, None]
    new = tl.maximum(top, here)
    base = tl.where(here == float("-inf"), float("inf"), new)
    weight = tl.exp2(logit * _spread(norm, THREADS) - _spread(base, THREADS))
    fade = tl.where(top == new, 1.0, tl.exp2(top - new))
    total = total * fade + _sum(weight, THREADS)
    zeros = zeros * fade + _sum(weight * (v_zero + OFFSET * v_step), THREADS)
    return weight * v_step, _spread(fade, THREADS), new, total, zeros


@triton.jit
def _ring(
    q_at, exists, k_ptr, v_ptr, row, n, begin, end, first, query, low_bits, high_bits, T, scale2,
    D: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, WORDS: tl.constexpr, RECENT: tl.constexpr,
    RINGS: tl.constexpr,
):  # fmt: skip
    """Attention over the ring's tiles first, first + RINGS, ... of RECENT positions."""
    dim = tl.arange(0, D)
    kind: tl.constexpr = k_ptr.dtype.element_ty
    q = tl.load(q_at[:, None] + dim[None, :], mask=exists[:, None], other=0.0).to(kind)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(begin + first * RECENT, end, RINGS * RECENT, num_stages=1):
        p = start + tl.arange(0, RECENT)
        at = (row + p % _RING)[:, None] * D + dim[None, :]
        keep = (p < end)[:, None]
        k = tl.load(k_ptr + at, mask=keep, other=0.0)
        v = tl.load(v_ptr + at, mask=keep, other=0.0)
        logit = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = _visible(p, n, query, low_bits, high_bits, T, MASK, WORDS) & (p < end)[None, :]
        logit = tl.where(seen, logit, float("-inf"))
        new = tl.maximum(top, tl.max(logit, 1) * scale2)
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(logit * scale2 - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + _even_sum(weight, ROWS, RECENT)
        out = tl.dot(weight.to(kind), v, out * fade[:, None], input_precision="ieee")
        top = new
    return top, total, out


@triton.jit
def _place(row, dim):
    """Where a slot has a number: as the threads hold it, [8 rows, dimensions A | B, k, g, t, c]."""
    k, c = 2 * ((dim >> 4) & 1) + (dim >> 6), 2 * ((dim >> 3) & 1) + (row & 1)
    return (row >> 3) * 1024 + ((dim >> 5) & 1) * 512 + k * 128 + (dim & 7) * 16 + ((row >> 1) & 3) * 4 + c


@triton.jit
def _store(
    out_ptr, lse_ptr, slot, tile, top, total, out_a, out_b, rows,
    SLOT: tl.constexpr, THREADS: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A tile of each warp into a slot of its own."""
    PER: tl.constexpr = THREADS // GROUPS // 32
    own = tl.arange(0, THREADS // 4)[:, None]
    group, warp = own // (8 * PER), (own >> 3) % PER
    m = 8 * (TILES * group + tile) + (own & 7)
    tl.store(lse_ptr + (slot + warp) * SLOT + m, top + tl.log2(total), mask=m < rows)
    e = tl.arange(0, 16 * THREADS)
    lane, k, c = (e >> 2) & 31, e // (4 * THREADS), e & 3
    group, warp = e // (128 * PER) % GROUPS, (e >> 7) % PER
    first = 8 * (TILES * group + tile)
    keep = tl.max_constancy(first + 2 * (lane & 3) < rows, 4)
    at = out_ptr + (slot + warp) * (128 * SLOT) + first * 128 + k * 128 + lane * 4 + c
    tl.store(tl.max_contiguous(tl.multiple_of(at, 16), 4), out_a, mask=keep)
    tl.store(tl.max_contiguous(tl.multiple_of(at + 512, 16), 4), out_b, mask=keep)


@triton.jit(do_not_specialize=["splits", "T", "N", "ahead"])
def attend_kernel(
    q_ptr, k_upper_ptr, k_lower_ptr, v_upper_ptr, v_lower_ptr, k_step_ptr, k_zero_ptr, v_step_ptr, v_zero_ptr,
    ring_k_ptr, ring_v_ptr, len_ptr, blocks_ptr, bits_ptr, out_ptr, lse_ptr, scale2, splits, T, N, ahead,
    q_b, q_h, q_t, bits_b, bits_t,
    G: tl.constexpr, GROUP: tl.constexpr, SLOT: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    MASK: tl.constexpr, WORDS: tl.constexpr, RECENT: tl.constexpr, RINGS: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
    SCORES: tl.constexpr, SCORES_OF: tl.constexpr, VALUES: tl.constexpr, VALUES_OF: tl.constexpr,
    FINISH: tl.constexpr, FINISH_OF: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Partial out [SLOT, 128], base-2 lse [SLOT] of all packed rows over a split of the ring or the blocks.

    The first RINGS splits take tiles of the ring in turn, 16 rows at a time; the others equal shares of the
    blocks. `ahead`: blocks of a program that are brought to the L2 cache before the kernel in front has ended.
    """
    D: tl.constexpr = 128
    BLOCK: tl.constexpr = 2048
    THREADS: tl.constexpr = 32 * WARPS
    ROWS: tl.constexpr = 8 * TILES * GROUPS
    PAIRS: tl.constexpr = WARPS // GROUPS // 2
    pid, split = tl.program_id(0), tl.program_id(1)
    b, kv, head = pid // G, pid % G, pid.to(tl.int64)
    row = head * N
    k_words, v_words = k_upper_ptr.to(tl.pointer_type(tl.int32)), v_upper_ptr.to(tl.pointer_type(tl.int32))
    if CHAINED:
        if EARLY:
            gdc_launch_dependents()
        if split >= RINGS and ahead > 0:
            count = tl.load(blocks_ptr + b).to(tl.int32)
            ours = tl.cdiv(count, splits - RINGS)
            start = (split - RINGS) * ours
            size = tl.maximum(tl.minimum(tl.minimum(ours, ahead), count - start), 0) * (4 * BLOCK)
            into = (row + start).to(tl.int64) * (4 * BLOCK)
            plane = tl.arange(0, THREADS)
            at = tl.where(plane == 0, k_upper_ptr.to(tl.int64), v_upper_ptr.to(tl.int64)) + into
            tl.inline_asm_elementwise(
                _PREFETCH, "=r,l,r", [at, tl.where(plane < 2, size, 0)], dtype=tl.int32, is_pure=False, pack=1
            )
        gdc_wait()
    blocks = tl.load(blocks_ptr + b, cache_modifier=".cg").to(tl.int32)
    share = tl.cdiv(blocks, splits - RINGS)
    first = (split - RINGS) * share
    last = tl.minimum(first + share, blocks)
    PER: tl.constexpr = WARPS // GROUPS
    slot = (pid * (RINGS + (splits - RINGS) * PER)).to(tl.int64)
    if split < RINGS:
        slot += split
    else:
        slot += RINGS + (split - RINGS) * PER
    q_head = q_ptr + b.to(tl.int64) * q_b + (kv * GROUP).to(tl.int64) * q_h
    e = tl.arange(0, 16 * THREADS)
    c, t, g, k = e & 3, (e >> 2) & 3, (e >> 4) & 7, e // (4 * THREADS)
    m = 8 * TILES * ((e // (256 * PAIRS)) & (GROUPS - 1)) + g
    q_in = 32 * (k >> 1) + 8 * t + 4 * (k & 1) + c
    q_words = q_head.to(tl.pointer_type(tl.uint32))
    q_at = q_in + (m % GROUP).to(tl.int64) * (q_h // 2) + (m // GROUP).to(tl.int64) * (q_t // 2)
    word = _quads(q_words, q_at, tl.max_constancy(m < T * GROUP, 4), 1)
    if TILES == 2:
        m += 8
        q_at = q_in + (m % GROUP).to(tl.int64) * (q_h // 2) + (m // GROUP).to(tl.int64) * (q_t // 2)
        word_2 = _quads(q_words, q_at, tl.max_constancy(m < T * GROUP, 4), 1)
    if split < RINGS:
        dim = tl.arange(0, D)
        n, begin = tl.load(len_ptr + b).to(tl.int32), blocks * _BLOCK
        end = n + T if MASK else n
        for part in tl.static_range(SLOT // 16):
            packed = 16 * part + tl.arange(0, 16)
            query, member, exists = packed // GROUP, packed % GROUP, packed < T * GROUP
            q_from = q_head + member.to(tl.int64) * q_h + query.to(tl.int64) * q_t
            low_bits, high_bits = query.to(tl.int64), query.to(tl.int64)
            if MASK == 2:
                bits_at = bits_ptr + b.to(tl.int64) * bits_b + query.to(tl.int64) * bits_t
                low_bits = tl.load(bits_at, mask=exists, other=0)
                if WORDS == 2:
                    high_bits = tl.load(bits_at + 1, mask=exists, other=0)
            top, total, out = _ring(
                q_from, exists, ring_k_ptr, ring_v_ptr, head * _RING, n, begin, end, split,
                query, low_bits, high_bits, T, scale2, D, 16, MASK, WORDS, RECENT, RINGS,
            )  # fmt: skip
            if CHAINED and not EARLY and part == SLOT // 16 - 1:
                gdc_launch_dependents()
            out = out / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(lse_ptr + slot * SLOT + packed, top + tl.log2(total), mask=exists)
            at = slot * (SLOT * D) + _place(packed[:, None], dim[None, :])
            tl.store(out_ptr + at, out, mask=exists[:, None])
    elif first < last:
        FIRST: tl.constexpr = 1.0 if BITS == 4 else 0.0625
        BF16: tl.constexpr = q_ptr.dtype.element_ty == tl.bfloat16
        if LATE:
            q, norm = tl.zeros((16 * THREADS,), tl.int32), tl.zeros((THREADS // 4, 1), tl.float32)
        else:
            q, norm = _queries(word, k, FIRST, BF16, THREADS)
            norm *= scale2
        top = tl.full((THREADS // 4, 1), float("-inf"), tl.float32)
        total, zeros = tl.zeros((THREADS // 4, 4), tl.float32), tl.zeros((THREADS // 4, 4), tl.float32)
        out_a, out_b = tl.zeros((16 * THREADS,), tl.float32), tl.zeros((16 * THREADS,), tl.float32)
        if TILES == 2:
            q_2, norm_2 = _queries(word_2, k, FIRST, BF16, THREADS)
            norm_2 *= scale2
            top_2, total_2, zeros_2, out_a_2, out_b_2 = top, total, zeros, out_a, out_b
        wide_pair = (e >> 8) & (PAIRS - 1)
        wide_channel = 64 * wide_pair + 32 * (k >> 1) + 8 * t + 4 * (k & 1) + c
        wide_token = 128 * wide_pair + 64 * ((e >> 7) & 1) + 16 * t + 4 * k + c
        i = tl.arange(0, 1024 * PAIRS)
        near, eighth, kind = i & 15, (i >> 4) & 7, i // (256 * PAIRS)
        half, pair = (i >> 7) & 1, (i >> 8) & (PAIRS - 1)
        k_in = pair * BLOCK + (64 * half + 16 * (eighth >> 1) + 2 * kind + (eighth & 1)) * 16 + near
        v_in = pair * BLOCK + (8 * kind + eighth) * 32 + 16 * half + near
        channel, token = tl.arange(0, 64 * PAIRS), tl.arange(0, 128 * PAIRS)
        for start in tl.range(first, last, PAIRS, num_stages=STAGES):
            keep = tl.max_constancy(start + pair < last, 4)
            at = (row + start).to(tl.int64) * BLOCK
            k_a, k_b = _quads(k_words + at, k_in, keep, GROUPS), _quads(k_words + at, k_in + 128, keep, GROUPS)
            v_a, v_b = _quads(v_words + at, v_in, keep, GROUPS), _quads(v_words + at, v_in + 1024, keep, GROUPS)
            at = (row + start).to(tl.int64) * 64
            keep = start + channel // 64 < last
            zero = tl.load(k_zero_ptr.to(tl.pointer_type(tl.int32)) + at + channel, mask=keep, other=0)
            zero = _channels(zero, PAIRS, GROUPS)
            if GROUPS == 1:
                step = tl.load(k_step_ptr.to(tl.pointer_type(tl.int32)) + at + channel, mask=keep, other=0)
                step = _channels(step, PAIRS, GROUPS)
                keep = start + token // 128 < last
                v_step = _tokens(tl.load(v_step_ptr + at * 2 + token, mask=keep, other=0.0), PAIRS)
                v_zero = _tokens(tl.load(v_zero_ptr + at * 2 + token, mask=keep, other=0.0), PAIRS)
            else:
                # loaded as wide as they are needed: it is these loads that give the products their layout
                keep = tl.max_constancy(start + wide_pair < last, 4)
                step = _quads(k_step_ptr.to(tl.pointer_type(tl.int32)) + at, wide_channel, keep, 1)
                v_step = _fours(v_step_ptr + at * 2, wide_token, keep).to(tl.float32)
                v_zero = _fours(v_zero_ptr + at * 2, wide_token, keep).to(tl.float32)
            keys, values = (k_a, k_b), (v_a, v_b)
            if BITS == 8:
                keep = tl.max_constancy(start + pair < last, 4)
                at = (row + start).to(tl.int64) * BLOCK
                lower = k_lower_ptr.to(tl.pointer_type(tl.int32)) + at
                keys += (_quads(lower, k_in, keep, GROUPS), _quads(lower, k_in + 128, keep, GROUPS))
                lower = v_lower_ptr.to(tl.pointer_type(tl.int32)) + at
                values += (_quads(lower, v_in, keep, GROUPS), _quads(lower, v_in + 1024, keep, GROUPS))
            keys += (step, zero)
            if LATE:
                if start == first:  # not before the loop, so that the first blocks are on their way
                    q, norm = _queries(word, k, FIRST, BF16, THREADS)
                    norm *= scale2
            if TILES == 1:
                logit = tl.inline_asm_elementwise(
                    SCORES, SCORES_OF, keys + (q,), dtype=tl.float32, is_pure=True, pack=16
                )
            else:
                logit, logit_2 = tl.inline_asm_elementwise(
                    SCORES, SCORES_OF, keys + (q, q_2), dtype=(tl.float32, tl.float32), is_pure=True, pack=16
                )
            weight, fade, top, total, zeros = _softened(
                logit, norm, v_step, v_zero, top, total, zeros, OFFSET, THREADS
            )
            if TILES == 1:
                out_a, out_b = tl.inline_asm_elementwise(
                    VALUES, VALUES_OF, values + (weight, fade, out_a, out_b),
                    dtype=(tl.float32, tl.float32), is_pure=True, pack=16,
                )  # fmt: skip
            else:
                weight_2, fade_2, top_2, total_2, zeros_2 = _softened(
                    logit_2, norm_2, v_step, v_zero, top_2, total_2, zeros_2, OFFSET, THREADS
                )
                out_a, out_b, out_a_2, out_b_2 = tl.inline_asm_elementwise(
                    VALUES, VALUES_OF,
                    values + (weight, fade, weight_2, fade_2, out_a, out_b, out_a_2, out_b_2),
                    dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=16,
                )  # fmt: skip
        if CHAINED and not EARLY:
            gdc_launch_dependents()
        total, zeros = tl.sum(total, 1)[:, None], tl.sum(zeros, 1)[:, None]
        some = tl.where(total > 0, total, 1.0)
        factor, summand = _spread(1.0 / some, THREADS), _spread(zeros / some, THREADS)
        if TILES == 1:
            out_a, out_b = tl.inline_asm_elementwise(
                FINISH, FINISH_OF, (factor, summand, out_a, out_b), dtype=(tl.float32, tl.float32),
                is_pure=True, pack=16,
            )  # fmt: skip
        else:
            total_2, zeros_2 = tl.sum(total_2, 1)[:, None], tl.sum(zeros_2, 1)[:, None]
            some = tl.where(total_2 > 0, total_2, 1.0)
            factor_2, summand_2 = _spread(1.0 / some, THREADS), _spread(zeros_2 / some, THREADS)
            out_a, out_b, out_a_2, out_b_2 = tl.inline_asm_elementwise(
                FINISH, FINISH_OF, (factor, summand, factor_2, summand_2, out_a, out_b, out_a_2, out_b_2),
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=16,
            )  # fmt: skip
            _store(
                out_ptr, lse_ptr, slot, 1, top_2, total_2, out_a_2, out_b_2, T * GROUP, SLOT, THREADS, GROUPS,
                TILES,
            )  # fmt: skip
        _store(out_ptr, lse_ptr, slot, 0, top, total, out_a, out_b, T * GROUP, SLOT, THREADS, GROUPS, TILES)
    else:
        none = tl.arange(0, SLOT * PER)
        tl.store(lse_ptr + slot * SLOT + none, tl.full((SLOT * PER,), float("-inf"), tl.float32))


@triton.jit
def _slots(lse_ptr, out_ptr, first, count, tile, i, rows, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """lse [BLOCK, 8] of a tile's rows and numbers i [BLOCK, CHUNK] of slots first .. first + count - 1."""
    slot, m = tl.arange(0, BLOCK), 8 * tile + tl.arange(0, 8)
    at = (first + slot).to(tl.int64)[:, None] * SLOT
    lse = tl.load(lse_ptr + at + m[None, :], mask=(slot < count)[:, None] & (m < rows)[None, :], other=float("-inf"))
    own = tl.max_constancy(8 * tile + 2 * ((i >> 2) & 3) < rows, 4)
    # what an empty slot leaves unwritten is read with the rest, so as not to wait for lse, and dropped
    out = tl.load(
        out_ptr + at * 128 + (tile * 1024 + i)[None, :], mask=(slot < count)[:, None] & own[None, :], other=0.0
    )
    return lse, out


@triton.jit
def _weighed(lse, out, base, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Sums over slots of weights [8] and of weighted numbers [CHUNK]."""
    weight = tl.exp2(lse - base[None, :])
    wide = tl.reshape(weight, (BLOCK, 1, 4, 1, 2))
    out = tl.reshape(out, (BLOCK, CHUNK // 16, 4, 2, 2))
    out = tl.where(wide > 0, out * wide, 0.0)
    return tl.sum(weight, 0), tl.reshape(tl.sum(out, 0), (CHUNK,))


@triton.jit(do_not_specialize=["count", "T"])
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, count, T,
    G: tl.constexpr, GROUP: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr, RINGS: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """out_BTHD and natural lse_BHT: CHUNK numbers of 8 rows of a KV head, as they lie in a slot.

    `count`: slots of blocks, behind RINGS of the ring.
    """
    if CHAINED:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    pid, tile, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    first = pid * (RINGS + count)
    lse, out = _slots(part_lse_ptr, part_ptr, first + RINGS, count, tile, i, T * GROUP, SLOT, BLOCK)
    ring_lse, ring_out = _slots(part_lse_ptr, part_ptr, first, RINGS, tile, i, T * GROUP, SLOT, RINGS)
    if CHAINED and not EARLY:
        gdc_launch_dependents()
    top = tl.maximum(tl.max(lse, 0), tl.max(ring_lse, 0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total, out = _weighed(lse, out, base, BLOCK, CHUNK)
    ring_total, ring_out = _weighed(ring_lse, ring_out, base, RINGS, CHUNK)
    total += ring_total
    wide = tl.broadcast_to(tl.reshape(total, (1, 4, 1, 2)), (CHUNK // 16, 4, 2, 2))
    out = (out + ring_out) / tl.where(tl.reshape(wide, (CHUNK,)) > 0, tl.reshape(wide, (CHUNK,)), 1.0)
    b, kv = pid // G, pid % G
    m = 8 * tile + 2 * ((i >> 2) & 3) + (i & 1)
    dim = 64 * ((i >> 7) & 1) + 16 * ((i >> 8) & 1) + ((i >> 4) & 7) + 8 * ((i >> 1) & 1) + 32 * (i >> 9)
    out_at = (b.to(tl.int64) * T + m // GROUP) * (G * GROUP) + kv * GROUP + m % GROUP
    tl.store(out_ptr + out_at * 128 + dim, out.to(out_ptr.dtype.element_ty), mask=m < T * GROUP)
    if chunk == 0:
        row = 8 * tile + tl.arange(0, 8)
        index = (b.to(tl.int64) * (G * GROUP) + kv * GROUP + row % GROUP) * T + row // GROUP
        tl.store(lse_ptr + index, (top + tl.log2(total)) * _LN2, mask=row < T * GROUP)
