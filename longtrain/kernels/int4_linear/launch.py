"""Launches of `int4_linear_triton`: tiles by shape.

Shapes: as in `kernels.int4_linear`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longtrain.kernels.int4_linear import kernel as kernels
from longtrain.kernels.tree_attention.launch import chains, pdl


@dataclass(frozen=True)
class Tile:
    """How a program goes through weights.

    Args:
        lines: rows of weights of a program, gates and what they let pass counted both.
        slices: parts of a row that are read side by side, by a warp each.
        held: groups of a slice that a program reads into registers before it may read its input.
        groups: of a slice that are read at once after those.
        stages: steps in flight then.
        late: the next kernel is let in after the sums, not at once.
        rows: fewest rows of input that are made room for.
        registers: most of a thread.
    """

    lines: int
    slices: int
    held: int = 4
    groups: int = 1
    stages: int = 4
    late: bool = True
    rows: int = 1
    registers: int | None = None


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
    N, (_, J, _, half) = x_NK.shape[0], codes_EJ8X.shape
    tile = tile or tile_for(features * 2 if gated else features, J, N)
    out_NF = x_NK.new_empty(N, features)
    add = out_NF if add_NF is None else add_NF.expand(out_NF.shape)
    add = add if add.stride(1) == 1 else add.contiguous()
    chained = chains(x_NK.device)
    of_tile = constants(tile, J, gated=gated)
    with torch.cuda.device_of(x_NK):
        kernels.int4_kernel[(triton.cdiv(features, of_tile["OUTPUTS"]),)](
            x_NK, codes_EJ8X, table_EJ82.view(torch.int32), add, out_NF, N, features, J,
            x_NK.stride(0), add.stride(0), out_NF.stride(0),
            HALF=half, ROWS=max(tile.rows, triton.next_power_of_2(N)), ADD=add_NF is not None, **of_tile,
            PORTABLE=os.environ.get("TRITON_INTERPRET") == "1", CHAINED=chained, num_warps=tile.slices,
            **({"maxnreg": tile.registers} if tile.registers else {}), **pdl(chained),
        )  # fmt: skip
    return out_NF


def tile_for(lines: int, groups: int, rows: int) -> Tile:
    """The tile for so many rows of weights, of so many groups each, and so many rows of input.

    Many rows of weights keep all cores busy by their number; of few, each is cut into more slices, and what a
    program reads is held in registers, unless rows of input need those.
    """
    if lines >= 16384:
        return Tile(32, 4, held=0, stages=3, late=False)
    if rows > 2:
        return Tile(16, 8, held=0)
    if groups >= 64 or lines > 4096:
        return Tile(16, 8, registers=None if groups >= 64 else 80)
    return Tile(16, 16)


def constants(tile: Tile, groups: int, *, gated: bool) -> dict[str, int]:
    """The kernel's constants for rows of so many groups."""
    each = triton.cdiv(groups, tile.slices)
    held = min(tile.held, each)
    reach = held + triton.cdiv(each - held, tile.groups) * tile.groups
    return {
        "OUTPUTS": tile.lines // 2 if gated else tile.lines,
        "SLICES": tile.slices,
        "HELD": held,
        "LOOP": reach > held,
        "GROUPS": tile.groups,
        "EVEN": reach * tile.slices == groups,
        "GATED": gated,
        "STAGES": tile.stages,
        "LATE": tile.late,
    }
