"""Triton kernel that merges what the programs of `fragments_kernel` leave: parts of a softmax in slots.

A slot holds its rows' partial results in the order in which the threads of that kernel hold them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.tree_attention.merge_kernel import merged


@triton.jit(do_not_specialize=["T"])
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, T,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """out_BTHD and natural lse_BHT: CHUNK numbers of 8 rows of a KV head, as they lie in a slot."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    pid, tile, i = tl.program_id(0), tl.program_id(1), tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    m = 8 * tile + 2 * ((i >> 2) & 3) + (i & 1)
    keep = m < T * GROUP
    at = pid.to(tl.int64) * (SPLITS * ROWS)
    part_at = part_ptr + at * 128 + tile * 1024 + i
    out, lse = merged(part_lse_ptr + at + m, part_at, keep, SPLITS, ROWS, ROWS * 128)
    dim = 64 * ((i >> 7) & 1) + 16 * ((i >> 8) & 1) + ((i >> 4) & 7) + 8 * ((i >> 1) & 1) + 32 * (i >> 9)
    b, member, query = (pid // G).to(tl.int64), pid % G * GROUP + m % GROUP, m // GROUP
    out_at = ((b * T + query) * (G * GROUP) + member) * 128 + dim
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=keep)
    tl.store(lse_ptr + (b * (G * GROUP) + member) * T + query, lse, mask=keep & (dim == 0))
