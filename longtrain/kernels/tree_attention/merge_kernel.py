"""Triton kernel that merges the partial results of split attention into one softmax.

A thread has one number of the result, and reads that number and its row's lse from every split. So threads do
not wait for each other, and only once for memory.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
# ruff: noqa: RUF005 (triton knows no starred tuples)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merged(lse_at, part_at, keep, SPLITS: tl.constexpr, LSES: tl.constexpr, PARTS: tl.constexpr):
    """Numbers of the merged result and the natural lse of their rows, in fp32.

    lse_at, part_at: pointers to a number's base-2 lse and to the number in the first split. The next splits
    are LSES and PARTS further. A split without keys has an lse of -inf, and its numbers are undefined.
    """
    top = tl.full(keep.shape, float("-inf"), tl.float32)
    total, out = tl.zeros(keep.shape, tl.float32), tl.zeros(keep.shape, tl.float32)
    AT_ONCE: tl.constexpr = SPLITS if SPLITS <= 64 else 32
    last = tl.where(keep, SPLITS, 0)
    for start in tl.range(0, SPLITS, AT_ONCE, num_stages=1):
        lses, parts = (), ()
        for i in tl.static_range(AT_ONCE):
            inside = keep if SPLITS <= 64 else last > start + i
            lses = lses + (tl.load(lse_at + (start + i) * LSES, mask=inside, other=float("-inf")),)
            parts = parts + (tl.load(part_at + (start + i) * PARTS, mask=inside, other=0.0),)
        new = top
        for i in tl.static_range(AT_ONCE):
            new = tl.maximum(new, lses[i])
        base = tl.where(new == float("-inf"), 0.0, new)
        fade = tl.exp2(top - base)
        total, out, top = total * fade, out * fade, new
        for i in tl.static_range(AT_ONCE):
            weight = tl.exp2(lses[i] - base)
            total += weight
            out += tl.where(weight > 0, parts[i] * weight, 0.0)
    return out / tl.where(total > 0, total, 1.0), (top + tl.log2(total)) * _LN2


@triton.jit(do_not_specialize=["T"])
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, T,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """out_BTHD and natural lse_BHT: CHUNK numbers of the packed rows of a KV head."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    head, i = tl.program_id(0), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m, dim = i // WIDTH, i % WIDTH
    keep = (m < T * GROUP) & (dim < D)
    slot = (head.to(tl.int64) * tl.cdiv(T * GROUP, ROWS) + m // ROWS) * SPLITS
    at = slot * ROWS + m % ROWS
    out, lse = merged(part_lse_ptr + at, part_ptr + at * WIDTH + dim, keep, SPLITS, ROWS, ROWS * WIDTH)
    b, member = (head // G).to(tl.int64), head % G * GROUP + m % GROUP
    query = m // GROUP
    out_at = ((b * T + query) * (G * GROUP) + member) * D + dim
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(lse_ptr + (b * (G * GROUP) + member) * T + query, lse, mask=keep & (dim == 0))
