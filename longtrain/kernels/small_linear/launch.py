"""Launches of `small_linear_triton`: tiles by shape.

Shapes: as in `kernels.small_linear`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longtrain.kernels.small_linear import kernel as kernels
from longtrain.kernels.tree_attention.launch import chains, pdl


@dataclass(frozen=True)
class Tile:
    """How a program goes through weights.

    Args:
        outputs: output features of a program; of gates and of what they let pass, so many each.
        slices: parts of a row that are read side by side.
        step: input features of a slice that are read at once.
        stages: steps in flight.
        warps: of a program.
        late: the next kernel is let in after the sums, not at once.
    """

    outputs: int
    slices: int
    step: int = 128
    stages: int = 5
    warps: int = 4
    late: bool = True


def small_linear(
    x_NK: Tensor, weight_FK: Tensor, residual: Tensor | None, *, tile: Tile | None = None
) -> Tensor:
    """See `kernels.small_linear.small_linear`; `tile` for measurements."""
    F = weight_FK.shape[0]
    out_NF = x_NK.new_empty(x_NK.shape[0], F)
    add_NF = None if residual is None else residual.expand(out_NF.shape)
    return _launch(x_NK, weight_FK, out_NF, add_NF, tile or tile_for(F), gated=False)


def small_swiglu(x_NK: Tensor, weight_FK: Tensor, *, tile: Tile | None = None) -> Tensor:
    """See `kernels.small_linear.small_swiglu`; `tile` for measurements."""
    out_NI = x_NK.new_empty(x_NK.shape[0], weight_FK.shape[0] // 2)
    return _launch(x_NK, weight_FK, out_NI, None, tile or tile_for(out_NI.shape[1], gated=True), gated=True)


def tile_for(features: int, *, gated: bool = False) -> Tile:
    """The tile for so many output features: the fewer, the more slices, so that all cores have work."""
    if gated:
        return Tile(16, 2, stages=4)
    if features >= 16384:
        return Tile(32, 2)
    return Tile(16, 4, stages=3) if features > 4096 else Tile(32, 2, late=False)


def _launch(
    x_NK: Tensor, weight_FK: Tensor, out_NF: Tensor, add_NF: Tensor | None, tile: Tile, *, gated: bool
) -> Tensor:
    (N, K), F = x_NK.shape, out_NF.shape[1]
    chained = chains(x_NK.device)
    add = out_NF if add_NF is None else add_NF if add_NF.stride(1) == 1 else add_NF.contiguous()
    reach = triton.cdiv(K, tile.slices * tile.step) * tile.step
    with torch.cuda.device_of(x_NK):
        kernels.linear_kernel[(triton.cdiv(F, tile.outputs),)](
            x_NK, weight_FK, add, out_NF, N, F, K,
            x_NK.stride(0), weight_FK.stride(0), add.stride(0), out_NF.stride(0),
            OUTPUTS=tile.outputs, SLICES=tile.slices, ROWS=8 if N <= 8 else 16, STEP=tile.step,
            EVEN=reach * tile.slices == K, GATED=gated, ADD=add_NF is not None,
            STAGES=tile.stages, LATE=tile.late, CHAINED=chained, num_warps=tile.warps, **pdl(chained),
        )  # fmt: skip
    return out_NF
