"""Triton kernels of `kernels.row_scores`: logits with partial sums of each chunk, then log-weights.

The queries that share a key head are packed into the rows of one tile, so that keys are read once. Sums over
a sequence are put together from chunks of a fixed size in a fixed order; what lies beyond the visible rows
adds zeros. Logits are kept natural.
Shapes: as there; M packed queries (groups of sets that share a key head x query heads of a set), chunks of
CHUNK slots.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def logits_kernel(
    q_ptr, k_ptr, n_ptr, logit_ptr, lse_ptr, scale, q_b, q_x, q_h, k_b, k_s, k_c, logit_m, chunks,
    G: tl.constexpr, SHARE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Logits [M, CHUNK] of one chunk of a key head's rows, and the log of each query's sum, in fp32.

    logit_ptr: [B, X, H, logit_m]; lse_ptr: [B, X, H, chunks].
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    c, chunk, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(n_ptr + b).to(tl.int32)
    start = chunk * CHUNK
    if start >= n:
        return
    m, dim, key = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    exists = m < SHARE * H
    x = (c // G * SHARE + m // H) * G + c % G
    at = b.to(tl.int64) * q_b + x.to(tl.int64) * q_x + (m % H).to(tl.int64) * q_h
    wide = (dim < D)[None, :]
    q = tl.load(q_ptr + at[:, None] + dim[None, :], mask=exists[:, None] & wide, other=0.0)
    q = q.to(k_ptr.dtype.element_ty)
    sets = tl.num_programs(0) * SHARE
    line = (b * sets + x).to(tl.int64) * H + m % H
    k_ptr += b.to(tl.int64) * k_b + c.to(tl.int64) * k_c
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    last = tl.minimum(start + CHUNK, n)
    for first in tl.range(start, last, KEYS, num_stages=STAGES):
        slot = first + key
        inside = slot < n
        k = tl.load(
            k_ptr + slot.to(tl.int64)[:, None] * k_s + dim[None, :], mask=inside[:, None] & wide, other=0.0
        )
        logit = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        keep = exists[:, None] & inside[None, :]
        tl.store(logit_ptr + line[:, None] * logit_m + slot[None, :], logit, mask=keep)
        logit = tl.where(inside[None, :], logit * _LOG2E, float("-inf"))
        new = tl.maximum(top, tl.max(logit, 1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(logit - new[:, None]), 1)
        top = new
    tl.store(lse_ptr + line * chunks + chunk, (top + tl.log2(total)) * _LN2, mask=exists)


@triton.jit(do_not_specialize=["chunks"])  # or sums would be added in an order that `chunks` says
def weights_kernel(
    logit_ptr, lse_ptr, n_ptr, score_ptr, logit_m, chunks, S,
    H: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Scores of BLOCK slots of one set: the highest of its heads' logits less the log of their sums."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    x, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(n_ptr + b).to(tl.int32)
    line = (b * tl.num_programs(0) + x).to(tl.int64)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    score_ptr += line * S
    if block * BLOCK >= n:
        tl.store(score_ptr + slot, tl.full((BLOCK,), float("-inf"), tl.float32), mask=slot < S)
        return
    head, one = tl.arange(0, HEADS), tl.arange(0, TILE)
    exists = head < H
    line = line * H + head
    logit = tl.load(
        logit_ptr + line[:, None] * logit_m + slot[None, :],
        mask=exists[:, None] & (slot < logit_m)[None, :],
        other=float("-inf"),
    )
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    live = tl.cdiv(n, CHUNK)
    for first in range(0, live, TILE):
        at = first + one
        part = tl.load(
            lse_ptr + line[:, None] * chunks + at[None, :],
            mask=exists[:, None] & (at < live)[None, :],
            other=float("-inf"),
        )
        part = tl.where(exists[:, None], part * _LOG2E, 0.0)
        new = tl.maximum(top, tl.max(part, 1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(part - new[:, None]), 1)
        top = new
    lse = (top + tl.log2(total)) * _LN2
    best = tl.max(logit - lse[:, None], 0)
    tl.store(score_ptr + slot, tl.where(slot < n, best, float("-inf")), mask=slot < S)
