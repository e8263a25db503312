"""Triton kernels of `kernels.top_entries`, and their launches: exact top-k in three passes.

1. `peaks_kernel`: scores are mapped to unsigned integers of the same order. Position s belongs to group
   s % GROUPS; the maximum of every group is written.
2. `reach_kernel`: the K-th largest group maximum is a lower bound of the K-th largest score. Each chunk of
   BLOCK positions writes the positions that reach it, which are few more than K.
3. `choose_kernel`: one program for each set bisects on the integers to find the K-th largest of those, and
   writes the set. Up to FEW positions are held in registers; more are read again for every step.

Sinks and window are left out of all three, and K is reduced by their number. Sequences of at most K entries
are written out whole. Only integers are compared and counted, so the division of work does not change the
result.

Shapes: as in `kernels.top_entries`; a `row` is one set of one sequence.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import chaining, dense_rows, launched_on

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
    """Write the maximum of COLUMNS groups of one set, 0 for a group without an eligible position.

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
    if DUE:  # noqa: SIM102 (DUE is a compile-time constant)
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
    """Write the positions of one chunk whose scores reach the lower bound, ascending, and their count.

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
    # the bound bit by bit: a bit stays set while at least `need` group maxima are as large
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
    """The upper middle of two unsigned numbers, without overflow."""
    return high - ((high - low) >> 1)


@triton.jit
def _part(score_ptr, slot_ptr, count_ptr, chunk, BLOCK: tl.constexpr):
    """Positions of a chunk that reach the bound, and their scores as integers (0 beyond their count)."""
    each = tl.arange(0, BLOCK)
    inside = each < tl.load(count_ptr + chunk)
    slot = tl.load(slot_ptr + chunk * BLOCK + each, mask=inside, other=0)
    return slot, tl.where(inside, _order(score_ptr, slot, inside), 0)


@triton.jit
def _write(out_ptr, slot, order, edge, equal_before, place, skipped):
    """Write the positions with scores above `edge`, and those equal to it after the first `skipped` of them.

    equal_before: positions equal to `edge` in earlier chunks; place: output index of the first position
    written here. Returns both, updated, for the next chunk.
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
    """Write one set. few_ptr: scratch memory for FEW positions of each set, the most held in registers."""
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
        before = tl.cumsum(count, 0) - count  # gather the chunks' positions into one contiguous list
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
        while low < high:  # invariant: at least `need` scores are >= low, fewer than `need` are > high
            middle = _middle(low, high)
            enough = tl.sum((order >= middle).to(tl.int32), 0) >= need
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        larger = tl.sum((order > low).to(tl.int32), 0)
        skipped = tl.sum((order == low).to(tl.int32), 0) - (need - larger)
        _write(out_ptr, slot, order, low, 0, sinks, skipped)
        return

    # too many for registers: every step of the bisection reads all chunks again
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
    high = tl.where(tl.sum(above, 0) < need, low, high)  # most are equal (to -inf, say): no bisection needed
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


_MOST_FEW = 16384
"""Most positions that one program of `choose_kernel` holds in registers."""


@dataclass(frozen=True)
class ChoiceTile:
    """Launch parameters; all sizes are powers of two.

    Args:
        groups: groups of positions; at least twice K are used.
        columns: groups of one program of `peaks_kernel`.
        block: positions of a chunk.
        warps: warps of a program of each of the three kernels.
    """

    groups: int = 4096
    columns: int = 128
    block: int = 4096
    warps: tuple[int, int, int] = (4, 16, 8)


TILE = ChoiceTile()
"""Chosen on an H200 at 32K and 128K positions, 8 and 32 sets."""


def choose_entries(
    scores_BXS: Tensor,
    len_B: Tensor,
    out_BXK: Tensor,
    sinks: int,
    window: int,
    due_B: Tensor | None,
    tile: ChoiceTile = TILE,
) -> None:
    """See `kernels.top_entries.choose_entries`."""
    B, X, S = scores_BXS.shape
    rows, K = B * X, out_BXK.shape[2]
    if not rows:
        return
    scores_BXS = dense_rows(scores_BXS)
    twice = triton.next_power_of_2(2 * (K - sinks - window))
    groups, few = min(max(tile.groups, twice), _MOST_FEW), min(max(2048, twice), _MOST_FEW)
    chunks = max(1, triton.cdiv(S, tile.block))
    span = max(1, min(tile.block, 8192 // triton.next_power_of_2(chunks)))
    sizes = [rows * groups, rows * chunks * tile.block, rows * chunks, rows * few]
    scratch = torch.empty(sum(sizes), dtype=torch.int32, device=scores_BXS.device)
    peaks, slots, counts, held = scratch.split(sizes)
    texts = (scores_BXS, len_B, len_B if due_B is None else due_B.view(torch.uint8))
    strides, limits = scores_BXS.stride()[:2], (X, sinks, window, K)
    const = {"DUE": due_B is not None, **chaining(scores_BXS.device)}
    with launched_on(scores_BXS):
        peaks_kernel[(rows, groups // tile.columns)](
            *texts, peaks.view(torch.uint32), *strides, S, *limits,
            GROUPS=groups, COLUMNS=tile.columns,
            TILE=min(32, triton.next_power_of_2(triton.cdiv(S, groups))), num_warps=tile.warps[0], **const,
        )  # fmt: skip
        reach_kernel[(rows, chunks)](
            *texts, peaks.view(torch.uint32), slots, counts, *strides, S, *limits, chunks,
            GROUPS=groups, BLOCK=tile.block, num_warps=tile.warps[1], **const,
        )  # fmt: skip
        choose_kernel[(rows,)](
            *texts, slots, counts, held, out_BXK, *strides, *out_BXK.stride()[:2], *limits, chunks,
            BLOCK=tile.block, CHUNKS=triton.next_power_of_2(chunks), SPAN=span, FEW=few,
            num_warps=tile.warps[2], **const,
        )  # fmt: skip
