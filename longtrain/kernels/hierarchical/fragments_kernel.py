"""Triton kernels of hierarchical attention for up to 32 packed rows and heads of 128: warps work
independently, and `merge_kernel` combines the splits.

The formulas are those of `attention_kernel`. There a program's warps share every product; here a warp
processes half a block (64 tokens) from its load to its weighted values, and warps are combined once, at the
end. For that tensors have a fixed register layout. A tensor of 16 registers a thread is flat, [4 k, W warps,
8 g, 4 t, 4 c]: register r = 4 k + c of the thread with lane 4 g + t; warp 2 p + h has half h of the p-th of
the program's blocks of a round. With more than 16 rows (PARTS = 2) two warps share such a half, each for 16
rows: they unpack the same codes, which are loaded once. A thread has

    keys      bytes 16 t .. 16 t + 15 of the tokens 64 h + 16 (g / 2) + 2 i + g mod 2, i = k, and k + 4
    steps     of key channels 64 (k / 2) + 16 t + 8 (k mod 2) + 2 c and the next, as are zeros and q
    scores    of row g with the tokens 64 h + 16 t + r
    values    tokens 64 h + 16 t + 4 c .. of the dimensions 8 k + g (and + 64), and those + 32
    sums      of the dimensions 64 (k mod 2) + 16 (k / 2) + g + 8 (c / 2), and those + 32, row 2 t + c mod 2

so that a thread's loads are of 16 bytes, scores have the layout of the weights that the next product takes,
and only a row's maximum (four threads) and the factor of its older sums (`fragments_ptx`) move between
threads. Packed rows are numbered as in `tree_attention.kernel`; two TILES of 8 share what a warp unpacks. A
row's result does not depend on other rows, nor on TILES or PARTS.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
# ruff: noqa: RUF005 (triton knows no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.hierarchical.fragments_reductions import (
    even_sum,
    finish,
    log2_near,
    spread,
    thread_max,
    thread_sum,
    thread_sum_of_products,
)
from longtrain.kernels.tree_attention.kernel import _visible

_BLOCK = tl.constexpr(128)
_RING = tl.constexpr(384)
LIFT, SLACK = tl.constexpr(10.0), tl.constexpr(5.0)
"""The base of a row's softmax makes the largest weight, times its value's step, 2^LIFT. It changes only if
one would be larger by a factor above 2^SLACK, and fp16 holds up to 2^15: so older sums seldom have to be
rescaled. The smallest fp16 number, 2^-24, is 2^-34 of the largest weight or less."""


@triton.jit
def wait_in_loop():
    """Wait for the preceding kernel. Triton 3.9 does not pipeline a loop that contains its own `gdc_wait`."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _quads(at, offset, keep):
    """Load words, four consecutive ones for each thread."""
    return tl.load(tl.max_contiguous(tl.multiple_of(at + offset, 16), 4), mask=keep, other=0)


@triton.jit
def _shared(words, HALVES: tl.constexpr, PARTS: tl.constexpr):
    """Broadcast words that one warp of each half of a block has loaded to all PARTS warps of that half."""
    if PARTS > 1:
        x = tl.reshape(words, (4, HALVES, 1, 128))
        words = tl.reshape(tl.broadcast_to(x, (4, HALVES, PARTS, 128)), (512 * HALVES * PARTS,))
    return words


@triton.jit
def _codes(at, offset, FAR: tl.constexpr, keep, HALVES: tl.constexpr, PARTS: tl.constexpr):
    """Load a plane's words A and B, which are FAR words apart."""
    a, b = _quads(at, offset, keep), _quads(at, offset + FAR, keep)
    return _shared(a, HALVES, PARTS), _shared(b, HALVES, PARTS)


@triton.jit
def _channels(words, PAIRS: tl.constexpr, PARTS: tl.constexpr):
    """Words of two channels, [pair, half, t, k, c], in the register layout of the keys."""
    x = tl.permute(tl.reshape(words, (PAIRS, 2, 4, 2, 4)), (1, 3, 0, 2, 4))
    x = tl.broadcast_to(tl.reshape(x, (4, PAIRS, 1, 4, 4)), (4, PAIRS, 16 * PARTS, 4, 4))
    return tl.reshape(x, (1024 * PAIRS * PARTS,))


@triton.jit
def _tokens(at, fours, block, last):
    """Load steps or zeros of a thread's tokens as 64-bit words of four fp16 numbers.

    They are unpacked (`_cut`) only when needed, since unpacking waits for the load.
    """
    return tl.load(at.to(tl.pointer_type(tl.uint64)) + fours, mask=block < last, other=0)


@triton.jit
def _number(words, AT: tl.constexpr):
    """The fp16 number at index AT of each word, from the lowest bits on, in fp32."""
    return ((words >> (16 * AT)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _cut(words, THREADS: tl.constexpr):
    """Unpack the words of `_tokens`, in order."""
    even, odd = tl.join(_number(words, 0), _number(words, 2)), tl.join(_number(words, 1), _number(words, 3))
    return tl.reshape(tl.join(even, odd), (16 * THREADS,))


@triton.jit
def _queries(
    q_ptr, q_h, q_t, rows, scale2,
    TILE: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr, BF16: tl.constexpr, PARTS: tl.constexpr,
    THREADS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Load a thread's queries as words of two fp16 numbers, and return the factor of their rows' scores.

    Each packed row is divided by a power of two (exact for bf16 and fp16); the factor is `scale2` times that
    power. Codes that are unpacked without a shift are 16 times too large: their queries are divided by 16.
    CHAINED: wait for the preceding kernel, which computes the queries.
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
    """A step of the online softmax of a tile: weights of the values' codes, and the factor of older sums.

    A row's weights times their tokens' steps stay below 2^15, as fp16 requires. Products with one rounding
    are written as `fma`, and the launch forbids other fusing: the assembler would fuse in one tile and not in
    another, and the last bit of a row would depend on it.
    """
    most = tl.fma(thread_max(logit, THREADS), norm, log2_near(thread_max(v_step, THREADS))) - LIFT
    here = tl.max(most, 1)[:, None]
    # keep the old base unless the maximum grew by more than SLACK; a row without keys gets weights of 0
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

    A load is queued behind those of all other programs, so later tiles are requested early (STAGES).
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
    """Index of a number in a partial result, in register order: [8 rows, dimensions A | B, k, g, t, c]."""
    k, c = 2 * ((dim >> 4) & 1) + (dim >> 6), 2 * ((dim >> 3) & 1) + (row & 1)
    return (row >> 3) * 1024 + ((dim >> 5) & 1) * 512 + k * 128 + (dim & 7) * 16 + ((row >> 1) & 3) * 4 + c


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

    The first RINGS splits process tiles of the ring in turn, the others equal shares of the blocks.
    CHAINED: see `kernels.devices`. The number of blocks is read, and with one part a split's first blocks are
    requested, before this kernel waits. Its successor may start at once.
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
            if LATE:  # noqa: SIM102 (LATE is a compile-time constant)
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
        finish(
            out_ptr, lse_ptr, top, total, zeros, out_a, out_b, T * GROUP, FINISH, FINISH_OF, HALVES, PARTS
        )  # fmt: skip
        if TILES == 2:
            finish(
                out_ptr + 1024, lse_ptr + 8, top_2, total_2, zeros_2, out_a_2, out_b_2, T * GROUP - 8,
                FINISH, FINISH_OF, HALVES, PARTS,
            )  # fmt: skip
    else:
        if CHAINED:
            gdc_wait()
        none = tl.arange(0, ROWS)
        tl.store(lse_ptr + none, tl.full((ROWS,), float("-inf"), tl.float32))
