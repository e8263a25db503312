"""What `fragments_kernel` does with a row's numbers: sums and maxima, in an order that no layout changes.

A flat tensor is [4 k, THREADS / 4, 4 t, 4 c], as in `fragments_kernel`: four threads (t) have the numbers of
a row, 16 each (k and c).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LIFT, SLACK = tl.constexpr(10.0), tl.constexpr(5.0)
"""A row's weights, times the steps of their values, are counted from a base that makes the largest 2^LIFT. It
stays until one would be larger by more than 2^SLACK, and 2^15 is what fp16 still holds; so older sums seldom
have to be multiplied by how much they shrink. The smallest number of fp16, 2^-24, is 2^-34 of the largest
weight or less."""
LOG2 = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")


@triton.jit
def wait_in_loop():
    """Wait for the kernel in front. Triton 3.9 does not pipeline a loop that has its `gdc_wait`."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def spread(x, THREADS: tl.constexpr):
    """One number of each thread, or of each row, in all 16 registers of the threads that it belongs to."""
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
    """Sums of rows in one order, whatever threads hold them: neighbours first."""
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
