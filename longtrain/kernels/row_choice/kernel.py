"""Triton kernels of `kernels.row_choice`: a radix selection over chunks of a row of scores, and its writing.

Scores become unsigned numbers in the same order. Four passes find the K-th largest of them, eight bits each:
a pass counts, chunk by chunk, the digits of the numbers that begin as the K-th one does, and the next
pass reads from those counts which digit comes next. The last kernel knows from the counts how many rows each
chunk before its own gives, so every chunk writes its rows to their place.

Rows at the first and last places are no part of this: as many fewer are looked for. Texts of at most K rows
are written out whole. Only integers are added, so the division into chunks changes nothing.
Shapes: as there; a row is a set of a sequence, chunks are BLOCK slots each, digits 256.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_MOST = tl.constexpr(3.4028234663852886e38)
_DIGITS = tl.constexpr(256)


@triton.jit
def _order(score_ptr, slot, S):
    """Scores as unsigned numbers in the same order; those that do not count are read, too."""
    x = tl.load(score_ptr + slot, mask=slot < S, other=0.0).to(tl.float32)
    x = tl.where(x != x, -_MOST, x)
    x = tl.minimum(tl.maximum(x, -_MOST), _MOST)
    x = tl.where(x == 0.0, 0.0, x)  # of two zeros one
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def _digit(count_ptr, chunks, need, TILE: tl.constexpr):
    """The digit of the `need`-th largest number, and how many numbers have a higher one."""
    digit, chunk = tl.arange(0, _DIGITS), tl.arange(0, TILE)
    total = tl.zeros((_DIGITS,), tl.int32)
    for first in range(0, chunks, TILE):
        at = first + chunk
        part = tl.load(
            count_ptr + at[:, None] * _DIGITS + digit[None, :], mask=(at < chunks)[:, None], other=0
        )
        total += tl.sum(part, 0)
    from_here = tl.sum(total, 0) - tl.cumsum(total, 0) + total
    found = tl.sum((from_here >= need).to(tl.int32), 0) - 1
    return found, tl.sum(tl.where(digit > found, total, 0), 0)


@triton.jit
def _is_due(due_ptr, b, DUE: tl.constexpr):
    due = True
    if DUE:
        due = tl.load(due_ptr + b) != 0
    return due


@triton.jit(do_not_specialize=["sinks", "window", "K", "chunks"])
def digits_kernel(
    score_ptr, len_ptr, due_ptr, count_ptr, above_ptr, state_ptr, score_b, score_x,
    S, X, sinks, window, K, chunks,
    LEVEL: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, DUE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Count the digits of one level in one chunk of a row.

    count_ptr: counts of two levels in turn, [2, rows, chunks, 256]. above_ptr: numbers of each chunk that are
    larger than all that begin as the K-th does, [rows, chunks]. state_ptr: of each row and level how the K-th
    number begins, and which of those that begin so it is, [rows, 4, 2].
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0), tl.program_id(1)
    b, x = row // X, row % X
    n = tl.load(len_ptr + b).to(tl.int32)
    live = tl.cdiv(n - window, BLOCK)
    if (n <= K) | (chunk >= live):
        return
    if not _is_due(due_ptr, b, DUE):
        return
    digit = tl.arange(0, _DIGITS)
    slot = chunk * BLOCK + tl.arange(0, BLOCK)
    free = (slot >= sinks) & (slot < n - window)
    order = _order(score_ptr + b.to(tl.int64) * score_b + x.to(tl.int64) * score_x, slot, S)
    plane = tl.num_programs(0).to(tl.int64) * chunks * _DIGITS
    count_ptr += row.to(tl.int64) * chunks * _DIGITS
    if LEVEL > 0:
        before_ptr = count_ptr + (LEVEL - 1) % 2 * plane
        need = K - sinks - window
        begin = need * 0
        if LEVEL > 1:
            begin = tl.load(state_ptr + row * 8 + (LEVEL - 1) * 2)
            need = tl.load(state_ptr + row * 8 + (LEVEL - 1) * 2 + 1)
        found, higher = _digit(before_ptr, live, need, TILE)
        begin = begin * _DIGITS + found
        own = tl.load(before_ptr + chunk * _DIGITS + digit)
        above = tl.sum(tl.where(digit > found, own, 0), 0)
        if LEVEL > 1:
            above += tl.load(above_ptr + row * chunks + chunk)
        tl.store(above_ptr + row * chunks + chunk, above)
        if chunk == 0:
            tl.store(state_ptr + row * 8 + LEVEL * 2, begin)
            tl.store(state_ptr + row * 8 + LEVEL * 2 + 1, need - higher)
        free = free & ((order >> (32 - 8 * LEVEL)).to(tl.int32) == begin)
    own_digit = ((order >> (24 - 8 * LEVEL)) & (_DIGITS - 1)).to(tl.int32)
    counts = tl.histogram(own_digit, _DIGITS, mask=free)
    tl.store(count_ptr + LEVEL % 2 * plane + chunk * _DIGITS + digit, counts)


@triton.jit(do_not_specialize=["sinks", "window", "K", "chunks"])
def write_kernel(
    score_ptr, len_ptr, due_ptr, count_ptr, above_ptr, state_ptr, out_ptr, score_b, score_x, out_b, out_x,
    S, X, sinks, window, K, chunks,
    BLOCK: tl.constexpr, TILE: tl.constexpr, DUE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Write the chosen rows of one chunk; of the first chunk also those that are chosen in any case."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0), tl.program_id(1)
    b, x = row // X, row % X
    n = tl.load(len_ptr + b).to(tl.int32)
    if not _is_due(due_ptr, b, DUE):
        return
    out_ptr += b.to(tl.int64) * out_b + x.to(tl.int64) * out_x
    each = tl.arange(0, BLOCK)
    if n <= K:
        if chunk == 0:
            for first in range(0, K, BLOCK):
                at = first + each
                tl.store(out_ptr + at, tl.where(at < n, at, 0).to(tl.int64), mask=at < K)
        return
    live = tl.cdiv(n - window, BLOCK)
    if chunk >= live:
        return
    if chunk == 0:
        for first in range(0, sinks + window, BLOCK):
            at = first + each
            late = at >= sinks
            place = tl.where(late, at + K - sinks - window, at)
            value = tl.where(late, at + n - sinks - window, at)
            tl.store(out_ptr + place, value.to(tl.int64), mask=at < sinks + window)

    slot = chunk * BLOCK + each
    free = (slot >= sinks) & (slot < n - window)
    order = _order(score_ptr + b.to(tl.int64) * score_b + x.to(tl.int64) * score_x, slot, S)
    plane = tl.num_programs(0).to(tl.int64) * chunks * _DIGITS
    count_ptr += row.to(tl.int64) * chunks * _DIGITS + plane
    begin = tl.load(state_ptr + row * 8 + 6)
    need = tl.load(state_ptr + row * 8 + 7)
    found, higher = _digit(count_ptr, live, need, TILE)
    edge = (begin * _DIGITS + found).to(tl.uint32, bitcast=True)
    # rows of earlier chunks: larger ones, and those that are equal to the K-th
    digit, other = tl.arange(0, _DIGITS), tl.arange(0, TILE)
    larger = tl.zeros((TILE,), tl.int32)
    equal = tl.zeros((TILE,), tl.int32)
    equals = tl.zeros((TILE,), tl.int32)
    for first in range(0, live, TILE):
        at = first + other
        inside, earlier = at < live, at < chunk
        part = tl.load(count_ptr + at[:, None] * _DIGITS + digit[None, :], mask=inside[:, None], other=0)
        above = tl.load(above_ptr + row * chunks + at, mask=inside, other=0)
        above += tl.sum(tl.where((digit > found)[None, :], part, 0), 1)
        same = tl.sum(tl.where((digit == found)[None, :], part, 0), 1)
        larger += tl.where(earlier, above, 0)
        equal += tl.where(earlier, same, 0)
        equals += same
    larger_before, equal_before = tl.sum(larger, 0), tl.sum(equal, 0)
    skipped = tl.sum(equals, 0) - (need - higher)  # of equal ones the later are taken
    is_larger, is_equal = free & (order > edge), free & (order == edge)
    ranks = tl.cumsum((is_larger.to(tl.int32) << 16) + is_equal.to(tl.int32), 0)
    nth_equal = equal_before + (ranks & 0xFFFF)
    place = sinks + larger_before + (ranks >> 16) + tl.maximum(nth_equal - skipped, 0) - 1
    taken = is_larger | (is_equal & (nth_equal > skipped))
    tl.store(out_ptr + place, slot.to(tl.int64), mask=taken)
