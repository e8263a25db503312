"""Triton kernels of `kernels.row_choice`: a bound that leaves few rows, and the choice among these.

Scores become unsigned numbers in the same order. Slots are dealt out to groups in turn, so that neighbours
fall into different ones; of each group the highest number is taken (`peaks_kernel`). The K-th largest of
those is a lower bound of the K-th largest of all, and little more than K rows reach it: each chunk of slots
writes down its own (`reach_kernel`). One program for each set then finds the K-th largest of what is left by
bisection, and writes the set (`choose_kernel`). Where many rows reach the bound it goes over them in turns;
where most of these are equal, as scores of minus infinity are, without the bisection.

Rows at the first and last places are no part of this: as many fewer are looked for. Texts of at most K rows
are written out whole. Only integers are compared and counted, so how slots are divided changes nothing.
Shapes: as there; a row is a set of a sequence, chunks are BLOCK slots each.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_MOST = tl.constexpr(3.4028234663852886e38)
_BITS = tl.constexpr(16)
"""Upper bits of the bound; the others are 0."""


@triton.jit
def _order(score_ptr, slot, inside):
    """Scores as unsigned numbers above 0 in the same order."""
    x = tl.load(score_ptr + slot, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x != x, -_MOST, x)
    x = tl.minimum(tl.maximum(x, -_MOST), _MOST)
    x = tl.where(x == 0.0, 0.0, x)  # of two zeros one
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit(do_not_specialize=["sinks", "window", "K"])
def peaks_kernel(
    score_ptr, len_ptr, due_ptr, peak_ptr, score_b, score_x, S, X, sinks, window, K,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, DUE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The highest numbers of COLUMNS groups of a row, 0 where none counts; slot s is in group s % GROUPS.

    peak_ptr: [rows, GROUPS].
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    b, x = row // X, row % X
    n = tl.load(len_ptr + b).to(tl.int32)
    if n <= K:
        return
    if DUE:  # noqa: SIM102 (one of them is settled when this is compiled)
        if tl.load(due_ptr + b) == 0:
            return
    score_ptr += b.to(tl.int64) * score_b + x.to(tl.int64) * score_x
    group, turn = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TILE)
    peak = tl.zeros((COLUMNS,), tl.uint32)
    for first in range(0, n - window, TILE * GROUPS):
        slot = first + turn[:, None] * GROUPS + group[None, :]
        order = _order(score_ptr, slot, slot < S)
        order = tl.where((slot >= sinks) & (slot < n - window), order, 0)
        peak = tl.maximum(peak, tl.max(order, 0))
    tl.store(peak_ptr + row.to(tl.int64) * GROUPS + group, peak)


@triton.jit(do_not_specialize=["sinks", "window", "K", "chunks"])
def reach_kernel(
    score_ptr, len_ptr, due_ptr, peak_ptr, slot_ptr, count_ptr, score_b, score_x,
    S, X, sinks, window, K, chunks,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, DUE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The slots of one chunk whose numbers reach the bound, ascending, and how many they are.

    slot_ptr: [rows, chunks, BLOCK]; count_ptr: [rows, chunks].
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0), tl.program_id(1)
    b, x = row // X, row % X
    n = tl.load(len_ptr + b).to(tl.int32)
    if (n <= K) | (chunk * BLOCK >= n - window):
        return
    if DUE:  # noqa: SIM102
        if tl.load(due_ptr + b) == 0:
            return
    slot = chunk * BLOCK + tl.arange(0, BLOCK)
    order = _order(score_ptr + b.to(tl.int64) * score_b + x.to(tl.int64) * score_x, slot, slot < S)
    peak = tl.load(peak_ptr + row.to(tl.int64) * GROUPS + tl.arange(0, GROUPS))
    need = K - sinks - window
    bound, one = tl.full((), 0, tl.uint32), tl.full((), 1, tl.uint32)
    for bit in tl.static_range(_BITS):
        higher = bound | (one << (31 - bit))
        bound = tl.where(tl.sum((peak >= higher).to(tl.int32), 0) >= need, higher, bound)
    reaches = (slot >= sinks) & (slot < n - window) & (order >= bound)
    place = tl.cumsum(reaches.to(tl.int32), 0)
    own = row.to(tl.int64) * chunks + chunk
    tl.store(slot_ptr + own * BLOCK + place - 1, slot, mask=reaches)
    tl.store(count_ptr + own, tl.sum(reaches.to(tl.int32), 0))


@triton.jit
def _middle(low, high):
    """The upper middle of two unsigned numbers."""
    return high - ((high - low) >> 1)


@triton.jit
def _part(score_ptr, slot_ptr, count_ptr, chunk, BLOCK: tl.constexpr):
    """Slots of a chunk that reach the bound, their numbers (0 for none), and which there are."""
    each = tl.arange(0, BLOCK)
    inside = each < tl.load(count_ptr + chunk)
    slot = tl.load(slot_ptr + chunk * BLOCK + each, mask=inside, other=0)
    return slot, tl.where(inside, _order(score_ptr, slot, inside), 0)


@triton.jit
def _write(out_ptr, slot, order, edge, equal_before, place, skipped):
    """Write the slots above the edge, and of those at the edge all after the first `skipped` ones.

    equal_before: slots at the edge in earlier parts; place: where the first slot goes. Returns both for the
    next part.
    """
    larger, equal = order > edge, order == edge
    nth = equal_before + tl.cumsum(equal.to(tl.int32), 0)
    taken = larger | (equal & (nth > skipped))
    at = place + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(out_ptr + at, slot.to(tl.int64), mask=taken)
    return equal_before + tl.sum(equal.to(tl.int32), 0), place + tl.sum(taken.to(tl.int32), 0)


@triton.jit(do_not_specialize=["sinks", "window", "K", "chunks"])
def choose_kernel(
    score_ptr, len_ptr, due_ptr, slot_ptr, count_ptr, few_ptr, out_ptr, score_b, score_x, out_b, out_x,
    X, sinks, window, K, chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, SPAN: tl.constexpr, FEW: tl.constexpr, DUE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Write one set. few_ptr: room for FEW slots of each row; up to so many are held at once."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    b, x = row // X, row % X
    n = tl.load(len_ptr + b).to(tl.int32)
    if DUE:  # noqa: SIM102
        if tl.load(due_ptr + b) == 0:
            return
    out_ptr += b.to(tl.int64) * out_b + x.to(tl.int64) * out_x
    each = tl.arange(0, BLOCK)
    if n <= K:
        for first in range(0, K, BLOCK):
            at = first + each
            tl.store(out_ptr + at, tl.where(at < n, at, 0).to(tl.int64), mask=at < K)
        return
    for first in range(0, sinks + window, BLOCK):
        at = first + each
        late = at >= sinks
        value = tl.where(late, at + n - sinks - window, at)
        tl.store(
            out_ptr + tl.where(late, at + K - sinks - window, at),
            value.to(tl.int64),
            mask=at < sinks + window,
        )

    score_ptr += b.to(tl.int64) * score_b + x.to(tl.int64) * score_x
    slot_ptr += row.to(tl.int64) * chunks * BLOCK
    count_ptr += row * chunks
    need, live = K - sinks - window, tl.cdiv(n - window, BLOCK)
    chunk = tl.arange(0, CHUNKS)
    count = tl.load(count_ptr + chunk, mask=chunk < live, other=0)
    total = tl.sum(count, 0)
    if total <= FEW:
        few_ptr += row.to(tl.int64) * FEW
        before = tl.cumsum(count, 0) - count
        for first in range(0, tl.max(count, 0), SPAN):
            nth = first + tl.arange(0, SPAN)
            inside = nth[None, :] < count[:, None]
            some = tl.load(slot_ptr + chunk[:, None] * BLOCK + nth[None, :], mask=inside, other=0)
            tl.store(few_ptr + before[:, None] + nth[None, :], some, mask=inside)
        tl.debug_barrier()
        at = tl.arange(0, FEW)
        slot = tl.load(few_ptr + at, mask=at < total, other=0)
        order = tl.where(at < total, _order(score_ptr, slot, at < total), 0)
        high = tl.max(order, 0)
        low = tl.min(tl.where(at < total, order, high), 0)
        while low < high:
            middle = _middle(low, high)
            enough = tl.sum((order >= middle).to(tl.int32), 0) >= need
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        larger = tl.sum((order > low).to(tl.int32), 0)
        skipped = tl.sum((order == low).to(tl.int32), 0) - (need - larger)
        _write(out_ptr, slot, order, low, 0, sinks, skipped)
        return

    highest = tl.zeros((BLOCK,), tl.uint32)
    lowest = tl.full((BLOCK,), 0xFFFFFFFF, tl.uint32)
    for one in range(0, live):
        _, order = _part(score_ptr, slot_ptr, count_ptr, one, BLOCK)
        highest = tl.maximum(highest, order)
        lowest = tl.minimum(lowest, tl.where(order > 0, order, 0xFFFFFFFF))
    low, high = tl.min(lowest, 0), tl.max(highest, 0)
    above = tl.zeros((BLOCK,), tl.int32)
    for one in range(0, live):
        _, order = _part(score_ptr, slot_ptr, count_ptr, one, BLOCK)
        above += (order > low).to(tl.int32)
    high = tl.where(tl.sum(above, 0) < need, low, high)  # most are equal, and nothing is left to look for
    while low < high:
        middle = _middle(low, high)
        reach = tl.zeros((BLOCK,), tl.int32)
        for one in range(0, live):
            _, order = _part(score_ptr, slot_ptr, count_ptr, one, BLOCK)
            reach += (order >= middle).to(tl.int32)
        enough = tl.sum(reach, 0) >= need
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    larger, equal = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for one in range(0, live):
        _, order = _part(score_ptr, slot_ptr, count_ptr, one, BLOCK)
        larger += (order > low).to(tl.int32)
        equal += (order == low).to(tl.int32)
    skipped = tl.sum(equal, 0) - (need - tl.sum(larger, 0))
    seen, place = skipped * 0, sinks
    for one in range(0, live):
        slot, order = _part(score_ptr, slot_ptr, count_ptr, one, BLOCK)
        seen, place = _write(out_ptr, slot, order, low, seen, place, skipped)
