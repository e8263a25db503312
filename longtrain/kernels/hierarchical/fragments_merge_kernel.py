"""Triton kernel that merges what the programs of `fragments_kernel` leave: parts of a softmax in slots.

A slot holds its rows' partial results in the order in which the threads of that kernel hold them.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["slots", "T"])
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, slots, T,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """out_BTHD and natural lse_BHT: CHUNK numbers of 8 rows of a KV head, as they lie in a slot."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    pid, tile, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, row, i = tl.arange(0, BLOCK), 8 * tile + tl.arange(0, 8), chunk * CHUNK + tl.arange(0, CHUNK)
    inside, rows = (slot < slots)[:, None], T * GROUP
    at = (pid * slots + slot).to(tl.int64)[:, None] * ROWS
    lse = tl.load(part_lse_ptr + at + row[None, :], mask=inside & (row < rows)[None, :], other=float("-inf"))
    m = 8 * tile + 2 * ((i >> 2) & 3)
    keep = inside & tl.max_constancy(m < rows, 4)[None, :]
    # what an empty slot leaves unwritten is read with the rest, so as not to wait for lse, and dropped
    out = tl.load(part_ptr + at * 128 + (tile * 1024 + i)[None, :], mask=keep, other=0.0)
    top = tl.max(lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - base[None, :])
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total > 0, total, 1.0)[None, :]
    wide = tl.reshape(weight, (BLOCK, 1, 4, 1, 2))
    out = tl.reshape(out, (BLOCK, CHUNK // 16, 4, 2, 2))
    out = tl.reshape(tl.sum(tl.where(wide > 0, out * wide, 0.0), 0), (CHUNK,))
    b, kv = pid // G, pid % G
    m += i & 1
    dim = 64 * ((i >> 7) & 1) + 16 * ((i >> 8) & 1) + ((i >> 4) & 7) + 8 * ((i >> 1) & 1) + 32 * (i >> 9)
    out_at = (b.to(tl.int64) * T + m // GROUP) * (G * GROUP) + kv * GROUP + m % GROUP
    tl.store(out_ptr + out_at * 128 + dim, out.to(out_ptr.dtype.element_ty), mask=m < rows)
    if chunk == 0:
        index = (b.to(tl.int64) * (G * GROUP) + kv * GROUP + row % GROUP) * T + row // GROUP
        tl.store(lse_ptr + index, (top + tl.log2(total)) * _LN2, mask=row < rows)
