"""Triton kernels of `kernels.entry_scores`, and their launches: logits with a log-sum for each chunk, then
log weights.

The queries that share a key head are packed into the rows of one tile, so that keys are read once. A
sequence's sum is accumulated from chunks of a fixed size in a fixed order, and positions beyond the visible
entries add zeros: so scores do not depend on the number of positions.

Shapes: as in `kernels.entry_scores`; M packed queries (groups of sets that share a key head x query heads of
a set), chunks of CHUNK positions.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import chaining, dense_rows, launched_on, width_of

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def logits_kernel(
    q_ptr, k_ptr, n_ptr, logit_ptr, lse_ptr, scale, q_b, q_x, q_h, k_b, k_s, k_c, logit_m, chunks,
    G: tl.constexpr, SHARE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Logits [M, CHUNK] of one chunk of a key head's entries, and each query's log-sum-exp, in fp32.

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


@triton.jit(do_not_specialize=["chunks"])  # else the order of additions would depend on `chunks`
def weights_kernel(
    logit_ptr, lse_ptr, n_ptr, score_ptr, logit_m, chunks, S,
    H: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Scores of BLOCK positions of one set: the maximum over heads of logit minus log-sum-exp."""
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


@dataclass(frozen=True)
class ScoreTile:
    """Sizes of the kernels' tiles.

    Args:
        keys: positions of a tile of keys, a power of two from 16 on.
        chunk: positions of a program, a multiple of `keys`.
        warps: warps of a program.
        stages: tiles in flight.
        block: positions of a program of the second kernel, a power of two.
    """

    keys: int = 128
    chunk: int = 1024
    warps: int = 4
    stages: int = 3
    block: int = 1024


TILE = ScoreTile()
"""One for all sizes: an entry's score must not depend on how many entries there are."""
_SUMS = 128
"""Chunks whose log-sums the second kernel reads at once; fixed, for the same order of additions."""


def entry_scores(
    q_BXHD: Tensor, k_BSCD: Tensor, n_B: Tensor, groups: int, scale: float, tile: ScoreTile = TILE
) -> Tensor:
    """See `kernels.entry_scores.entry_scores`."""
    (B, X, H, D), (S, C) = q_BXHD.shape, k_BSCD.shape[1:3]
    scores_BXS = torch.empty(B, X, S, dtype=torch.float32, device=k_BSCD.device)
    if not scores_BXS.numel():
        return scores_BXS
    q_BXHD, share = dense_rows(q_BXHD), X // C
    chunks, line = triton.cdiv(S, tile.chunk), triton.cdiv(S, 16) * 16
    logits = torch.empty(B * X * H * line, dtype=torch.float32, device=k_BSCD.device)
    sums = torch.empty(B * X * H * chunks, dtype=torch.float32, device=k_BSCD.device)
    chained = chaining(k_BSCD.device)
    with launched_on(k_BSCD):
        logits_kernel[(C, chunks, B)](
            q_BXHD, k_BSCD, n_B, logits, sums, scale, *q_BXHD.stride()[:3], *k_BSCD.stride()[:3],
            line, chunks,
            G=groups, SHARE=share, H=H, D=D, WIDTH=width_of(D),
            ROWS=max(16, triton.next_power_of_2(share * H)), KEYS=tile.keys, CHUNK=tile.chunk,
            STAGES=tile.stages, num_warps=tile.warps, **chained,
        )  # fmt: skip
        weights_kernel[(X, triton.cdiv(S, tile.block), B)](
            logits, sums, n_B, scores_BXS, line, chunks, S,
            H=H, HEADS=triton.next_power_of_2(H), CHUNK=tile.chunk, TILE=_SUMS, BLOCK=tile.block,
            num_warps=4, **chained,
        )  # fmt: skip
    return scores_BXS
