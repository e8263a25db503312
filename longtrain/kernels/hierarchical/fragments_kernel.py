"""Triton kernel of hierarchical attention for up to 32 packed rows and heads of 128: warps on their own.

The formulas are those of `attention_kernel`. There a program's warps share every product; here a warp
takes half a block (64 tokens) from loading it to its weighted values, and warps meet once, at the end. For
that tensors are laid out by hand. A tensor of 16 registers a thread is flat, [4 k, W warps, 8 g, 4 t, 4 c]:
register r = 4 k + c of the thread with lane 4 g + t; warp 2 p + h has half h of the p-th of the program's
blocks of a round. With more than 16 rows (PARTS = 2) two warps share such a half, each for 16 rows: they
unpack the same codes, which are brought once. What a thread holds is

    keys      bytes 16 t .. 16 t + 15 of the tokens 64 h + 16 (g / 2) + 2 i + g mod 2, i = k, and k + 4
    steps     of key channels 64 (k / 2) + 16 t + 8 (k mod 2) + 2 c and the next, as are zeros and q
    scores    of row g with the tokens 64 h + 16 t + r
    values    tokens 64 h + 16 t + 4 c .. of the dimensions 8 k + g (and + 64), and those + 32
    sums      of the dimensions 64 (k mod 2) + 16 (k / 2) + g + 8 (c / 2), and those + 32, row 2 t + c mod 2

so that a thread's loads are of 16 bytes, scores come out where the weights go in, and nothing moves between
threads but a row's maximum (four threads) and how much its sums shrink (`fragments_ptx`). Packed rows
are numbered as in `tree_attention.kernel`; two TILES of 8 share what a warp unpacks. Nothing of a row's
result depends on other rows, nor on TILES or PARTS.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
# ruff: noqa: RUF005 (triton knows no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.hierarchical.fragments_rows import (
    LIFT,
    SLACK,
    even_sum,
    log2_near,
    spread,
    thread_max,
    thread_sum,
    thread_sum_of_products,
    wait_in_loop,
)
from longtrain.kernels.tree_attention.kernel import _visible

_BLOCK = tl.constexpr(128)
_RING = tl.constexpr(384)


@triton.jit
def _quads(at, offset, keep):
    """Words, four of a thread at consecutive addresses."""
    return tl.load(tl.max_contiguous(tl.multiple_of(at + offset, 16), 4), mask=keep, other=0)


@triton.jit
def _shared(words, HALVES: tl.constexpr, PARTS: tl.constexpr):
    """Words that one warp of each half of a block has loaded, in all PARTS warps of that half."""
    if PARTS > 1:
        x = tl.reshape(words, (4, HALVES, 1, 128))
        words = tl.reshape(tl.broadcast_to(x, (4, HALVES, PARTS, 128)), (512 * HALVES * PARTS,))
    return words


@triton.jit
def _codes(at, offset, FAR: tl.constexpr, keep, HALVES: tl.constexpr, PARTS: tl.constexpr):
    """A plane's words A and B, which lie FAR words apart."""
    a, b = _quads(at, offset, keep), _quads(at, offset + FAR, keep)
    return _shared(a, HALVES, PARTS), _shared(b, HALVES, PARTS)


@triton.jit
def _channels(words, PAIRS: tl.constexpr, PARTS: tl.constexpr):
    """Words of two channels in the threads that need them: [pair, half, t, k, c] to registers."""
    x = tl.permute(tl.reshape(words, (PAIRS, 2, 4, 2, 4)), (1, 3, 0, 2, 4))
    x = tl.broadcast_to(tl.reshape(x, (4, PAIRS, 1, 4, 4)), (4, PAIRS, 16 * PARTS, 4, 4))
    return tl.reshape(x, (1024 * PAIRS * PARTS,))


@triton.jit
def _tokens(at, fours, block, last):
    """Steps or zeros of the tokens that a thread has scores of, as 64-bit words of four fp16 numbers.

    They stay words until they are needed: a number that is cut out of a word waits for the word's load.
    """
    return tl.load(at.to(tl.pointer_type(tl.uint64)) + fours, mask=block < last, other=0)


@triton.jit
def _number(words, AT: tl.constexpr):
    """The fp16 number at place AT, counted from the lowest bits, of each word, in fp32."""
    return ((words >> (16 * AT)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _cut(words, THREADS: tl.constexpr):
    """All numbers of the words of `_tokens`, in order."""
    even, odd = tl.join(_number(words, 0), _number(words, 2)), tl.join(_number(words, 1), _number(words, 3))
    return tl.reshape(tl.join(even, odd), (16 * THREADS,))


@triton.jit
def _queries(
    q_ptr, q_h, q_t, rows, scale2,
    TILE: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, BF16: tl.constexpr, PARTS: tl.constexpr,
    THREADS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A thread's queries as words of two fp16 numbers, and what their row's scores are multiplied by.

    The latter is `scale2` times the power of two that the row is divided by.
    Queries of 8 or 11 bits stay as they are. Where codes are 16 times too large, queries are divided by 16.
    CHAINED: the kernel in front makes them, so its end is waited for; False where it has been.
    """
    if CHAINED:
        wait_in_loop()
    e = tl.arange(0, 16 * THREADS)
    k, c, t = e // (4 * THREADS), e & 3, (e >> 2) & 3
    m = ((e >> 4) & 7) + 16 * ((e >> 7) & (PARTS - 1)) + 8 * TILE
    at = 32 * (k >> 1) + 8 * t + 4 * (k & 1) + c
    at += (m % GROUP).to(tl.int64) * (q_h // 2) + (m // GROUP).to(tl.int64) * (q_t // 2)
    word = _quads(q_ptr.to(tl.pointer_type(tl.uint32)), at, tl.max_constancy(m < rows, 4))
    if BF16:
        even = (word << 16).to(tl.float32, bitcast=True)
        odd = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        even, odd = _number(word, 0), _number(word, 1)
    norm = tl.max(thread_max(tl.maximum(tl.abs(even), tl.abs(odd)), THREADS), 1)[:, None]
    norm = tl.exp2(tl.ceil(tl.log2(tl.maximum(norm, 1e-30))))
    by = tl.where(k < 2, FIRST, 0.0625) / spread(norm, THREADS)
    low = (even * by).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = (odd * by).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (low | (high << 16)).to(tl.int32, bitcast=True), norm * scale2


@triton.jit
def _softened(logit, norm, v_step, v_zero, top, total, zeros, OFFSET: tl.constexpr, THREADS: tl.constexpr):
    """A step of the softmax of a tile: weights of the values' codes, and how much older sums shrink.

    A row's weights are kept below 2^15 by what their tokens' steps are, which is all that fp16 needs.
    Where a product is added to something and rounded once, `fma` says so, and the launch forbids other
    fusing: the assembler would fuse in one tile and not in the other, and a row's last bit would follow it.
    """
    most = tl.fma(thread_max(logit, THREADS), norm, log2_near(thread_max(v_step, THREADS))) - LIFT
    here = tl.max(most, 1)[:, None]
    new = tl.where(here > top + SLACK, here, top)
    base = tl.where(here == float("-inf"), float("inf"), new)
    weight = tl.exp2(tl.fma(logit, spread(norm, THREADS), -spread(base, THREADS)))
    fade = tl.where(top == new, 1.0, tl.exp2(top - new))
    total = tl.fma(total, fade, thread_sum(weight, THREADS))
    zero = thread_sum_of_products(weight, tl.fma(v_step, OFFSET, v_zero), THREADS)
    zeros = tl.fma(zeros, fade, zero)
    return weight * v_step, spread(fade, THREADS), new, total, zeros


@triton.jit
def _ring(
    q_at, exists, k_ptr, v_ptr, row, n, begin, end, first, query, low_bits, high_bits, T, scale2,
    D: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, WORDS: tl.constexpr, RECENT: tl.constexpr,
    RINGS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over the ring's tiles first, first + RINGS, ... of RECENT positions.

    A load waits in line behind all that other programs have asked for, so later tiles are asked for early.
    """
    dim = tl.arange(0, D)
    kind: tl.constexpr = k_ptr.dtype.element_ty
    q = tl.load(q_at[:, None] + dim[None, :], mask=exists[:, None], other=0.0).to(kind)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, D), tl.float32)
    for start in tl.range(begin + first * RECENT, end, RINGS * RECENT, num_stages=STAGES):
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
        weight = tl.exp2(tl.fma(logit, scale2, -base[:, None]))
        fade = tl.exp2(top - base)
        total = tl.fma(total, fade, even_sum(weight, ROWS, RECENT))
        out = tl.dot(weight.to(kind), v, out * fade[:, None], input_precision="ieee")
        top = new
    return top, total, out


@triton.jit
def _place(row, dim):
    """Where a slot has a number: as the threads hold it, [8 rows, dimensions A | B, k, g, t, c]."""
    k, c = 2 * ((dim >> 4) & 1) + (dim >> 6), 2 * ((dim >> 3) & 1) + (row & 1)
    return (row >> 3) * 1024 + ((dim >> 5) & 1) * 512 + k * 128 + (dim & 7) * 16 + ((row >> 1) & 3) * 4 + c


@triton.jit
def _to_warps(x, HALVES: tl.constexpr, PARTS: tl.constexpr):
    """A row's number [8 PARTS] for the warps that have it, [8 warps, 1]."""
    return tl.reshape(tl.broadcast_to(x[None, :], (HALVES, 8 * PARTS)), (8 * HALVES * PARTS, 1))


@triton.jit
def _added(x, HALVES: tl.constexpr, PARTS: tl.constexpr):
    """Numbers of the warps' threads [4, HALVES, PARTS * 128], flat, summed over halves: [4, PARTS * 128]."""
    HALF: tl.constexpr = HALVES // 2
    one, two = tl.split(tl.permute(tl.reshape(x, (4, 2, HALF * PARTS * 128)), (0, 2, 1)))
    if HALF == 1:
        return one + two
    else:
        return _added(one + two, HALF, PARTS)


@triton.jit
def _finish(
    out_at, lse_at, top, total, zeros, out_a, out_b, rows,
    FINISH: tl.constexpr, FINISH_OF: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Bring together what the warps have of a tile of each part, and store it."""
    THREADS: tl.constexpr = 32 * HALVES * PARTS
    total, zeros = tl.sum(total, 1)[:, None], tl.sum(zeros, 1)[:, None]
    most = tl.max(tl.reshape(top, (HALVES, 8 * PARTS)), 0)
    share = tl.exp2(top - _to_warps(most, HALVES, PARTS))
    sums = tl.sum(tl.reshape(total * share, (HALVES, 8 * PARTS)), 0)
    share /= _to_warps(sums, HALVES, PARTS)
    out_a, out_b = tl.inline_asm_elementwise(
        FINISH, FINISH_OF, (spread(share, THREADS), spread(zeros * share, THREADS), out_a, out_b),
        dtype=(tl.float32, tl.float32), is_pure=True, pack=16,
    )  # fmt: skip
    m = tl.arange(0, 8 * PARTS)
    m += 8 * (m // 8)
    tl.store(lse_at + m, most + tl.log2(sums), mask=m < rows)
    k, i = tl.arange(0, 4)[:, None], tl.arange(0, 128 * PARTS)[None, :]
    keep = tl.max_constancy(16 * (i >> 7) + 2 * ((i >> 2) & 3) < rows, [1, 4])
    at = out_at + 2048 * (i >> 7) + k * 128 + (i & 127)
    tl.store(at, _added(out_a, HALVES, PARTS), mask=keep)
    tl.store(at + 512, _added(out_b, HALVES, PARTS), mask=keep)


@triton.jit(do_not_specialize=["splits", "T", "N"])
def attend_kernel(
    q_ptr, k_upper_ptr, k_lower_ptr, v_upper_ptr, v_lower_ptr, k_step_ptr, k_zero_ptr, v_step_ptr, v_zero_ptr,
    ring_k_ptr, ring_v_ptr, len_ptr, blocks_ptr, bits_ptr, out_ptr, lse_ptr, scale2, splits, T, N,
    q_b, q_h, q_t, bits_b, bits_t,
    G: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    MASK: tl.constexpr, WORDS: tl.constexpr, RINGS: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr,
    SCORES: tl.constexpr, SCORES_OF: tl.constexpr, VALUES: tl.constexpr, VALUES_OF: tl.constexpr,
    FINISH: tl.constexpr, FINISH_OF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Partial out [ROWS, 128], base-2 lse [ROWS] of all packed rows over a split of the ring or the blocks.

    The first RINGS splits take tiles of the ring in turn, the others equal shares of the blocks.
    CHAINED: see `kernels.devices`. The number of blocks is read, and with one part a split's first blocks are
    asked for, before this kernel waits. The kernel behind it may start at once.
    """
    if CHAINED:
        gdc_launch_dependents()
    D: tl.constexpr = 128
    BLOCK: tl.constexpr = 2048
    ROWS: tl.constexpr = 16 * PARTS
    THREADS: tl.constexpr = 32 * WARPS
    HALVES: tl.constexpr = WARPS // PARTS
    PAIRS: tl.constexpr = HALVES // 2
    RECENT: tl.constexpr = 8 * BITS * PAIRS  # as many bytes as the blocks of a round
    pid, split = tl.program_id(0), tl.program_id(1)
    b, kv, head = pid // G, pid % G, pid.to(tl.int64)
    row = head * N
    k_words, v_words = k_upper_ptr.to(tl.pointer_type(tl.int32)), v_upper_ptr.to(tl.pointer_type(tl.int32))
    blocks = tl.load(blocks_ptr + b).to(tl.int32)
    share = tl.cdiv(blocks, splits - RINGS)
    first = (split - RINGS) * share
    last = tl.minimum(first + share, blocks)
    slot = (pid * splits + split).to(tl.int64)
    out_ptr += slot * (ROWS * D)
    lse_ptr += slot * ROWS
    q_head = q_ptr + b.to(tl.int64) * q_b + (kv * GROUP).to(tl.int64) * q_h
    if split < RINGS:
        if CHAINED:
            gdc_wait()
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
            D, ROWS, MASK, WORDS, RECENT, RINGS, STAGES,
        )  # fmt: skip
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(lse_ptr + m, top + tl.log2(total), mask=exists)
        tl.store(out_ptr + _place(m[:, None], dim[None, :]), out, mask=exists[:, None])
    elif first < last:
        LATE: tl.constexpr = PARTS == 1  # two parts have no registers for queries that come late
        FIRST: tl.constexpr = 1.0 if BITS == 4 else 0.0625
        BF16: tl.constexpr = q_ptr.dtype.element_ty == tl.bfloat16
        q, norm = tl.zeros((16 * THREADS,), tl.int32), tl.zeros((THREADS // 4, 1), tl.float32)
        top = tl.full((THREADS // 4, 1), float("-inf"), tl.float32)
        total, zeros = tl.zeros((THREADS // 4, 4), tl.float32), tl.zeros((THREADS // 4, 4), tl.float32)
        out_a, out_b = tl.zeros((16 * THREADS,), tl.float32), tl.zeros((16 * THREADS,), tl.float32)
        if TILES == 2:
            q_2, norm_2 = q, norm
            if not LATE:
                q, norm = _queries(
                    q_head, q_h, q_t, T * GROUP, scale2, 0, GROUP, FIRST, BF16, PARTS, THREADS, CHAINED
                )  # fmt: skip
                q_2, norm_2 = _queries(
                    q_head, q_h, q_t, T * GROUP, scale2, 1, GROUP, FIRST, BF16, PARTS, THREADS, False
                )  # fmt: skip
            top_2, total_2, zeros_2, out_a_2, out_b_2 = top, total, zeros, out_a, out_b
        i = tl.arange(0, 512 * HALVES)
        quad, h, pair = i // (128 * HALVES), (i >> 7) & 1, (i >> 8) & (PAIRS - 1)
        near, eighth = i & 15, (i >> 4) & 7
        k_in = pair * BLOCK + (64 * h + 16 * (eighth >> 1) + 2 * quad + (eighth & 1)) * 16 + near
        v_in = pair * BLOCK + (8 * quad + eighth) * 32 + 16 * h + near
        channel = tl.arange(0, 64 * PAIRS)
        four = tl.arange(0, 4 * THREADS)
        v_half = ((four >> 5) & (WARPS - 1)) // PARTS
        v_pair = v_half // 2
        fours = 16 * v_half + 4 * (four & 3) + four // THREADS
        at = (row + first).to(tl.int64) * 128
        v_step_next = _tokens(v_step_ptr + at, fours, first + v_pair, last)
        v_zero_next = _tokens(v_zero_ptr + at, fours, first + v_pair, last)
        for start in tl.range(first, last, PAIRS, num_stages=STAGES):
            keep = tl.max_constancy(start + pair < last, 4)
            at = (row + start).to(tl.int64) * BLOCK
            keys = _codes(k_words + at, k_in, 128, keep, HALVES, PARTS)
            values = _codes(v_words + at, v_in, 1024, keep, HALVES, PARTS)
            if BITS == 8:
                lower = k_lower_ptr.to(tl.pointer_type(tl.int32)) + at
                keys += _codes(lower, k_in, 128, keep, HALVES, PARTS)
                lower = v_lower_ptr.to(tl.pointer_type(tl.int32)) + at
                values += _codes(lower, v_in, 1024, keep, HALVES, PARTS)
            at = (row + start).to(tl.int64) * 64
            keep = start + channel // 64 < last
            step = tl.load(k_step_ptr.to(tl.pointer_type(tl.int32)) + at + channel, mask=keep, other=0)
            zero = tl.load(k_zero_ptr.to(tl.pointer_type(tl.int32)) + at + channel, mask=keep, other=0)
            keys += (_channels(step, PAIRS, PARTS), _channels(zero, PAIRS, PARTS))
            if LATE:  # noqa: SIM102 (settled when this is compiled)
                if start == first:
                    q, norm = _queries(
                        q_head, q_h, q_t, T * GROUP, scale2, 0, GROUP, FIRST, BF16, PARTS, THREADS, CHAINED
                    )  # fmt: skip
                    if TILES == 2:
                        q_2, norm_2 = _queries(
                            q_head, q_h, q_t, T * GROUP, scale2, 1, GROUP, FIRST, BF16, PARTS, THREADS, False
                        )  # fmt: skip
            v_step, v_zero = _cut(v_step_next, THREADS), _cut(v_zero_next, THREADS)
            at += PAIRS * 64
            v_step_next = _tokens(v_step_ptr + at * 2, fours, start + PAIRS + v_pair, last)
            v_zero_next = _tokens(v_zero_ptr + at * 2, fours, start + PAIRS + v_pair, last)
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
        _finish(
            out_ptr, lse_ptr, top, total, zeros, out_a, out_b, T * GROUP, FINISH, FINISH_OF, HALVES, PARTS
        )  # fmt: skip
        if TILES == 2:
            _finish(
                out_ptr + 1024, lse_ptr + 8, top_2, total_2, zeros_2, out_a_2, out_b_2, T * GROUP - 8,
                FINISH, FINISH_OF, HALVES, PARTS,
            )  # fmt: skip
    else:
        if CHAINED:
            gdc_wait()
        none = tl.arange(0, ROWS)
        tl.store(lse_ptr + none, tl.full((ROWS,), float("-inf"), tl.float32))
