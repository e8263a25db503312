"""Launches of `int4_linear_triton`: tiles by shape.

Shapes: as in `kernels.int4_linear`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longtrain.kernels import int4_linear_triton as kernels
from longtrain.kernels.small_linear_launch import within
from longtrain.kernels.tree_attention_launch import chains, pdl


@dataclass(frozen=True)
class Tile:
    """How a program goes through weights.

    Args:
        lines: rows of weights of a program, gates and what they let pass counted both.
        slices: parts of a row that are read side by side, by a warp each.
        groups: of a slice that are read at once.
        stages: steps in flight.
        ahead: bytes of a slice of eight rows asked for before the program may read its input; 0, or 512 times
            a power of two.
        rows: fewest rows of input that are made room for.
        piece: bytes of one request ahead, 128 or more.
    """

    lines: int
    slices: int
    groups: int = 1
    stages: int = 4
    ahead: int = 2048
    rows: int = 1
    piece: int = 128


def small_linear(
    x_NK: Tensor,
    codes_EJ8X: Tensor,
    table_EJ82: Tensor,
    add_NF: Tensor | None,
    *,
    features: int,
    gated: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Product of up to 16 rows.

    Args:
        x_NK: rows.
        codes_EJ8X: see `kernels.int4_linear`.
        table_EJ82: likewise.
        add_NF: what is added to the rounded product, or expands to it.
        features: of the output; as many gates lie above them where `gated`.
        gated: silu(gate) * up.
        tile: for measurements.
    """
    tile = tile or tile_for(features, gated=gated)
    N, (_, J, _, half) = x_NK.shape[0], codes_EJ8X.shape
    out_NF = x_NK.new_empty(N, features)
    add = out_NF if add_NF is None else add_NF.expand(out_NF.shape)
    add = add if add.stride(1) == 1 else add.contiguous()
    chained = chains(x_NK.device)
    outputs = tile.lines // 2 if gated else tile.lines
    reach = triton.cdiv(J, tile.slices * tile.groups) * tile.groups
    with torch.cuda.device_of(x_NK):
        kernels.int4_kernel[(triton.cdiv(features, outputs),)](
            x_NK, codes_EJ8X, table_EJ82.view(torch.int32), add, out_NF, N, features, J,
            x_NK.stride(0), add.stride(0), out_NF.stride(0),
            HALF=half, OUTPUTS=outputs, SLICES=tile.slices, ROWS=max(tile.rows, triton.next_power_of_2(N)),
            GROUPS=tile.groups, EVEN=reach * tile.slices == J, GATED=gated, ADD=add_NF is not None,
            AHEAD=within(tile.ahead, reach * 8 * half), PIECE=tile.piece, STAGES=tile.stages,
            PORTABLE=os.environ.get("TRITON_INTERPRET") == "1", CHAINED=chained, num_warps=tile.slices,
            **pdl(chained),
        )  # fmt: skip
    return out_NF


def tile_for(features: int, *, gated: bool = False) -> Tile:
    """The tile for so many output features."""
    return Tile(32, 8)
