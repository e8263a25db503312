"""Triton kernel that merges what the programs of `fragments_kernel` leave: parts of a softmax in slots.

A slot holds its rows' partial results in the order in which the threads of that kernel hold them. Here a
thread has one number of the result and reads it, and its row's weight, from every slot: threads do not wait
for each other, and only once for memory.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: RUF005 (triton knows no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LN2 = tl.constexpr(0.6931471805599453)
_AT_ONCE = tl.constexpr(64)


@triton.jit(do_not_specialize=["T"])
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, T,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """out_BTHD and natural lse_BHT: CHUNK numbers of 8 rows of a KV head, as they lie in a slot."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    pid, tile, i = tl.program_id(0), tl.program_id(1), tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    m = 8 * tile + 2 * ((i >> 2) & 3) + (i & 1)
    keep = m < T * GROUP
    at = pid.to(tl.int64) * (SLOTS * ROWS)
    lse_at, out_at = part_lse_ptr + at + m, part_ptr + at * 128 + tile * 1024 + i
    top = tl.full((CHUNK,), float("-inf"), tl.float32)
    total, out = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for start in tl.static_range(0, SLOTS, _AT_ONCE):
        lses, outs = (), ()
        new = top
        for slot in tl.static_range(start, min(start + _AT_ONCE, SLOTS)):
            # what an empty slot leaves unwritten is read with the rest and dropped, so as not to wait for lse
            lses = lses + (tl.load(lse_at + slot * ROWS, mask=keep, other=float("-inf")),)
            outs = outs + (tl.load(out_at + slot * (ROWS * 128), mask=keep, other=0.0),)
        for slot in tl.static_range(0, min(_AT_ONCE, SLOTS - start)):
            new = tl.maximum(new, lses[slot])
        base = tl.where(new == float("-inf"), 0.0, new)
        fade = tl.exp2(top - base)
        total, out, top = total * fade, out * fade, new
        for slot in tl.static_range(0, min(_AT_ONCE, SLOTS - start)):
            weight = tl.exp2(lses[slot] - base)
            total += weight
            out += tl.where(weight > 0, outs[slot] * weight, 0.0)
    out = out / tl.where(total > 0, total, 1.0)
    b, kv = pid // G, pid % G
    dim = 64 * ((i >> 7) & 1) + 16 * ((i >> 8) & 1) + ((i >> 4) & 7) + 8 * ((i >> 1) & 1) + 32 * (i >> 9)
    query, member = m // GROUP, kv * GROUP + m % GROUP
    out_at = (b.to(tl.int64) * T + query) * (G * GROUP) + member
    tl.store(out_ptr + out_at * 128 + dim, out.to(out_ptr.dtype.element_ty), mask=keep)
    lse_at = (b.to(tl.int64) * (G * GROUP) + member) * T + query
    tl.store(lse_ptr + lse_at, (top + tl.log2(total)) * _LN2, mask=keep & (dim == 0))
