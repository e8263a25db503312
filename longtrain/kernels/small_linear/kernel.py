"""Triton kernel of `kernels.small_linear`, and its launches: few tokens, bound by reading the weights.

Weights are the left operand of the tensor cores' product and the tokens its few columns. A program has some
output features and all their weights. The weight vector of a feature is cut into slices that are rows of
their own in the product: so few features fill the 64 rows of a product, and no sum runs across programs. Each
slice is multiplied with every slice of the input; of those blocks of the product, only the matching ones are
used. Sums are in the same order for any number of tokens.

Shapes: N tokens, F output features, K input features.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import chaining, dense_rows, launched_on


@triton.jit
def write_sums(y, add_ptr, out_ptr, first, N, F, add_n, out_n, GATED: tl.constexpr, ADD: tl.constexpr):
    """Store a program's sums; if GATED, those of gates come first, followed by those of up."""
    HALVES: tl.constexpr = 2 if GATED else 1
    OUTPUTS: tl.constexpr = y.shape[0] // HALVES
    ROWS: tl.constexpr = y.shape[1]
    row, own = tl.arange(0, ROWS).to(tl.int64)[None, :], first + tl.arange(0, OUTPUTS)[:, None]
    keep = (own < F) & (row < N)
    y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, OUTPUTS, ROWS)), (1, 2, 0)))
        y = gate / (1.0 + tl.exp(-gate)) * up
    if ADD:
        y += tl.load(add_ptr + row * add_n + own, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_n + own, y, mask=keep)


# K is specialised as a multiple of 16 (`serves`): else loads that are masked at K would read single weights
@triton.jit(do_not_specialize=["N", "F"])
def linear_kernel(
    x_ptr, weight_ptr, add_ptr, out_ptr, N, F, K, x_n, weight_f, add_n, out_n,
    OUTPUTS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """OUTPUTS features of all tokens.

    EVEN: K is a multiple of the inputs that all slices read in a step.
    LATE: the next kernel may start after the sums, not at once.
    GATED: the weights are those of F gates, then those of F up features; out is silu(gate) * up.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    LINES: tl.constexpr = HALVES * SLICES * OUTPUTS
    reach = tl.cdiv(K, SLICES * STEP) * STEP
    first = tl.program_id(0) * OUTPUTS
    line = tl.arange(0, LINES)
    slice_ = line // OUTPUTS % SLICES
    feature = tl.minimum(first + line % OUTPUTS, F - 1) + line // (OUTPUTS * SLICES) * F
    weight_at = weight_ptr + feature.to(tl.int64) * weight_f + slice_ * reach
    if CHAINED:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
    k = tl.arange(0, STEP)
    column = tl.arange(0, SLICES * ROWS)
    start = column // ROWS * reach
    x_at = x_ptr + (column % ROWS).to(tl.int64) * x_n + start
    exists = column % ROWS < N
    acc = tl.zeros((LINES, SLICES * ROWS), tl.float32)
    for i in tl.range(0, reach, STEP, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_at[:, None] + (i + k)[None, :])
            x = tl.load(x_at[:, None] + (i + k)[None, :], mask=exists[:, None], other=0.0)
        else:
            inside = slice_[:, None] * reach + (i + k)[None, :] < K
            weight = tl.load(weight_at[:, None] + (i + k)[None, :], mask=inside, other=0.0)
            inside = exists[:, None] & (start[:, None] + (i + k)[None, :] < K)
            x = tl.load(x_at[:, None] + (i + k)[None, :], mask=inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc)
    if CHAINED and LATE:
        gdc_launch_dependents()
    if SLICES > 1:
        acc = tl.where(slice_[:, None] == (column // ROWS)[None, :], acc, 0.0)
    y = tl.sum(tl.sum(tl.reshape(acc, (HALVES, SLICES, OUTPUTS, SLICES, ROWS)), 3), 1)
    write_sums(
        tl.reshape(y, (HALVES * OUTPUTS, ROWS)), add_ptr, out_ptr, first, N, F, add_n, out_n, GATED, ADD
    )


@dataclass(frozen=True)
class LinearTile:
    """Launch parameters of the kernel.

    Args:
        outputs: output features of a program; with gates, that many of gate and of up.
        slices: parts of a weight vector that are read side by side.
        step: input features of a slice that are read at once.
        stages: steps in flight.
        warps: warps of a program.
        late: True if the next kernel may start after the sums, not at once.
    """

    outputs: int
    slices: int
    step: int = 128
    stages: int = 5
    warps: int = 4
    late: bool = True


def small_linear(
    x_NK: Tensor, weight_FK: Tensor, residual: Tensor | None, *, tile: LinearTile | None = None
) -> Tensor:
    """See `kernels.small_linear.small_linear`; `tile` for measurements."""
    F = weight_FK.shape[0]
    out_NF = x_NK.new_empty(x_NK.shape[0], F)
    add_NF = None if residual is None else residual.expand(out_NF.shape)
    return _launch(x_NK, weight_FK, out_NF, add_NF, tile or tile_for(F), gated=False)


def small_swiglu(x_NK: Tensor, weight_FK: Tensor, *, tile: LinearTile | None = None) -> Tensor:
    """See `kernels.small_linear.small_swiglu`; `tile` for measurements."""
    out_NI = x_NK.new_empty(x_NK.shape[0], weight_FK.shape[0] // 2)
    return _launch(x_NK, weight_FK, out_NI, None, tile or tile_for(out_NI.shape[1], gated=True), gated=True)


def tile_for(features: int, *, gated: bool = False) -> LinearTile:
    """The tile for this number of output features; with fewer features more slices, to use all cores."""
    if gated:
        return LinearTile(16, 2, stages=4)
    if features >= 16384:
        return LinearTile(32, 2)
    if features <= 2048:
        return LinearTile(16, 4)
    return LinearTile(16, 4, stages=3) if features > 4096 else LinearTile(32, 2, late=False)


def _launch(
    x_NK: Tensor, weight_FK: Tensor, out_NF: Tensor, add_NF: Tensor | None, tile: LinearTile, *, gated: bool
) -> Tensor:
    (N, K), F = x_NK.shape, out_NF.shape[1]
    chained = chaining(x_NK.device)
    add = out_NF if add_NF is None else dense_rows(add_NF)
    reach = triton.cdiv(K, tile.slices * tile.step) * tile.step
    with launched_on(x_NK):
        linear_kernel[(triton.cdiv(F, tile.outputs),)](
            x_NK, weight_FK, add, out_NF, N, F, K,
            x_NK.stride(0), weight_FK.stride(0), add.stride(0), out_NF.stride(0),
            OUTPUTS=tile.outputs, SLICES=tile.slices, ROWS=8 if N <= 8 else 16, STEP=tile.step,
            EVEN=reach * tile.slices == K, GATED=gated, ADD=add_NF is not None,
            STAGES=tile.stages, LATE=tile.late, num_warps=tile.warps, **chained,
        )  # fmt: skip
    return out_NF
