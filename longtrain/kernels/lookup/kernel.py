"""Triton kernels of `kernels.lookup`, and their launches: a search of each part of a ring, then the copy.

A place's score is W numbers of C, one for each token that matches, less how far back the place is.
Shapes: as there; K parts of a ring.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import chaining, launched_on

_SLOTS = 1024
"""Slots of a program of the search."""


@triton.jit
def _search_kernel(
    ring_ptr, root_ptr, last_ptr, best_ptr, ring_b, slots, W: tl.constexpr, SLOTS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The best score of a part of one ring, in which the last token is not yet written."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < slots
    root = tl.load(root_ptr + b).to(tl.int32)
    end = (tl.load(last_ptr + b) & (slots - 1)).to(tl.int32)
    ring = ring_ptr + b * ring_b + (W - 1)
    runs = inside & (slot != end)
    matched = tl.zeros((SLOTS,), tl.int32)
    for k in tl.static_range(W):
        wanted = root if k == 0 else tl.load(ring + end - k)
        token = tl.where(slot - k == end, root, tl.load(ring + slot - k, mask=inside, other=-1))
        runs = runs & (token == wanted) & (wanted >= 0)
        matched += runs.to(tl.int32)
    score = tl.where(inside, matched * slots - ((end - slot) & (slots - 1)), 0)
    tl.store(best_ptr + b * tl.num_programs(1) + tl.program_id(1), tl.max(score, 0))


@triton.jit(do_not_specialize=["parts"])
def _copy_kernel(
    ring_ptr, root_ptr, last_ptr, best_ptr, out_ptr, ring_b, slots, parts,
    W: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The last token and what is copied of one ring; that token is written to it."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    part, node = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    best = tl.max(tl.load(best_ptr + b * parts + part, mask=part < parts, other=0), 0)
    back = tl.maximum(-tl.maximum(best, 0) & (slots - 1), 1)
    root, last = tl.load(root_ptr + b), tl.load(last_ptr + b)
    ring = ring_ptr + b * ring_b + (W - 1)
    pos = last - back + 1 + (node + back - 1) % back  # node 1 is the first that is copied
    old = (node > 0) & (node < N) & (pos != last)
    token = tl.load(ring + (pos & (slots - 1)), mask=old, other=0).to(tl.int64)
    tl.store(out_ptr + b * N + node, tl.where(old, token, root), mask=node < N)
    tl.store(ring + (last & (slots - 1)), root.to(tl.int32))


@triton.jit
def _put_kernel(
    ring_ptr, token_ptr, first_ptr, n_ptr, ring_b, token_b, token_t, slots, T,
    W: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The new tokens of one text."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, WIDTH)
    real = t < tl.load(n_ptr + b)
    token = tl.load(token_ptr + b * token_b + t * token_t, mask=real & (t < T), other=-1)
    at = (tl.load(first_ptr + b) + t) & (slots - 1)
    tl.store(ring_ptr + b * ring_b + (W - 1) + at, token.to(tl.int32), mask=t < T)


def extend(ring_BX: Tensor, ngram: int, root_B: Tensor, last_B: Tensor, count: int) -> Tensor:
    """See `kernels.lookup.extend`."""
    B, slots = len(ring_BX), ring_BX.shape[1] - ngram + 1
    parts = triton.cdiv(slots, _SLOTS)
    best_BK = ring_BX.new_empty(B, parts)
    out_BN = root_B.new_empty(B, 1 + count)
    root_B, last_B = root_B.contiguous(), last_B.contiguous()
    chained = chaining(ring_BX.device)
    with launched_on(ring_BX):
        _search_kernel[(B, parts)](
            ring_BX, root_B, last_B, best_BK, ring_BX.stride(0), slots, W=ngram, SLOTS=_SLOTS, **chained
        )
        _copy_kernel[(B,)](
            ring_BX, root_B, last_B, best_BK, out_BN, ring_BX.stride(0), slots, parts,
            W=ngram, N=1 + count, WIDTH=triton.next_power_of_2(1 + count),
            PARTS=triton.next_power_of_2(parts), num_warps=1, **chained,
        )  # fmt: skip
    return out_BN


def put(ring_BX: Tensor, ngram: int, tokens_BT: Tensor, first_B: Tensor, n_B: Tensor) -> None:
    """See `kernels.lookup.put`."""
    B, T = tokens_BT.shape
    chained = chaining(ring_BX.device)
    with launched_on(ring_BX):
        _put_kernel[(B,)](
            ring_BX, tokens_BT, first_B.contiguous(), n_B.contiguous(), ring_BX.stride(0),
            *tokens_BT.stride(), ring_BX.shape[1] - ngram + 1, T,
            W=ngram, WIDTH=triton.next_power_of_2(T), num_warps=1, **chained,
        )  # fmt: skip
