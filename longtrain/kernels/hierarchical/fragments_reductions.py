"""Reductions of `fragments_kernel`: within threads, over a program's warps, and over splits (`merge_kernel`).

Sums are added in an order that no register layout changes. A flat tensor is [4 k, THREADS / 4, 4 t, 4 c], as
in `fragments_kernel`: four threads (t) have the numbers of a row, 16 each (k and c).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.tree_attention.merge_kernel import merged

LOG2 = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")


@triton.jit
def spread(x, THREADS: tl.constexpr):
    """Broadcast one number per thread, or per row, to all 16 registers of its threads."""
    wide = tl.broadcast_to(x[None, :, :, None], (4, THREADS // 4, 4, 4))
    return tl.reshape(wide, (16 * THREADS,))


@triton.jit
def thread_sum(x, THREADS: tl.constexpr):
    """Sums of a row's numbers that one thread has, [THREADS / 4, 4]."""
    return tl.sum(tl.sum(tl.reshape(x, (4, THREADS // 4, 4, 4)), 3), 0)


@triton.jit
def thread_sum_of_products(x, y, THREADS: tl.constexpr):
    """`thread_sum` of x y, with one rounding for a product and the sum that it is added to."""
    x, y = tl.reshape(x, (4, THREADS // 4, 4, 2, 2)), tl.reshape(y, (4, THREADS // 4, 4, 2, 2))
    x_even, x_odd = tl.split(x)
    y_even, y_odd = tl.split(y)
    x_0, x_2 = tl.split(x_even)
    y_0, y_2 = tl.split(y_even)
    x_1, x_3 = tl.split(x_odd)
    y_1, y_3 = tl.split(y_odd)
    return tl.sum(tl.fma(x_3, y_3, tl.fma(x_2, y_2, tl.fma(x_1, y_1, x_0 * y_0))), 0)


@triton.jit
def thread_max(x, THREADS: tl.constexpr):
    """Largest of a row's numbers that one thread has, [THREADS / 4, 4]."""
    return tl.max(tl.max(tl.reshape(x, (4, THREADS // 4, 4, 4)), 3), 0)


@triton.jit
def even_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of rows in a fixed order (neighbours first), for any register layout."""
    size: tl.constexpr = COLUMNS // 2
    x = tl.sum(tl.reshape(x, (ROWS, size, 2)), 2)
    if size == 1:
        return tl.reshape(x, (ROWS,))
    else:
        return even_sum(x, ROWS, size)


@triton.jit
def log2_near(x):
    """log2 of positive numbers, to about 2^-22: one instruction."""
    return tl.inline_asm_elementwise(LOG2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _to_warps(x, HALVES: tl.constexpr, PARTS: tl.constexpr):
    """Broadcast a row's number [8 PARTS] to its warps, [8 warps, 1]."""
    return tl.reshape(tl.broadcast_to(x[None, :], (HALVES, 8 * PARTS)), (8 * HALVES * PARTS, 1))


@triton.jit
def _added(x, HALVES: tl.constexpr, PARTS: tl.constexpr):
    """Sum over halves: flat [4, HALVES, PARTS * 128] to [4, PARTS * 128]."""
    HALF: tl.constexpr = HALVES // 2
    one, two = tl.split(tl.permute(tl.reshape(x, (4, 2, HALF * PARTS * 128)), (0, 2, 1)))
    if HALF == 1:
        return one + two
    else:
        return _added(one + two, HALF, PARTS)


@triton.jit
def finish(
    out_at, lse_at, top, total, zeros, out_a, out_b, rows,
    FINISH: tl.constexpr, FINISH_OF: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combine the warps' results of a tile of each part, and store them."""
    THREADS: tl.constexpr = 32 * HALVES * PARTS
    total, zeros = tl.sum(total, 1)[:, None], tl.sum(zeros, 1)[:, None]
    most = tl.max(tl.reshape(top, (HALVES, 8 * PARTS)), 0)
    share = tl.exp2(top - _to_warps(most, HALVES, PARTS))
    sums = tl.sum(tl.reshape(total * share, (HALVES, 8 * PARTS)), 0)
    share /= _to_warps(sums, HALVES, PARTS)
    out_a, out_b = tl.inline_asm_elementwise(
        FINISH, FINISH_OF, (spread(share, THREADS), spread(zeros * share, THREADS), out_a, out_b),
        dtype=(tl.float32, tl.float32), is_pure=True, pack=16,
    )  # fmt: skip
    m = tl.arange(0, 8 * PARTS)
    m += 8 * (m // 8)
    tl.store(lse_at + m, most + tl.log2(sums), mask=m < rows)
    k, i = tl.arange(0, 4)[:, None], tl.arange(0, 128 * PARTS)[None, :]
    keep = tl.max_constancy(16 * (i >> 7) + 2 * ((i >> 2) & 3) < rows, [1, 4])
    at = out_at + 2048 * (i >> 7) + k * 128 + (i & 127)
    tl.store(at, _added(out_a, HALVES, PARTS), mask=keep)
    tl.store(at + 512, _added(out_b, HALVES, PARTS), mask=keep)


@triton.jit(do_not_specialize=["T"])
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, T,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """out_BTHD and natural lse_BHT: CHUNK numbers of 8 rows of a KV head, in the order of partial results."""
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
