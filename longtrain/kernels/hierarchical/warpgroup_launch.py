"""Launches the kernel of `warpgroup_kernel`: which calls it takes, its tiles, splits and partial buffers.

Splits are the same for every number of rows, so that a row's result does not depend on how many rows there
are. Shapes: see `kernels.hierarchical.attention`; M packed rows (new rows x query heads of a KV head).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from longtrain.errors import ConfigError, refusal
from longtrain.kernels.devices import (
    LOG2E,
    chaining,
    dense_rows,
    give_up,
    given_up,
    hopper_alone,
    interpreted,
    launched_on,
    partial_results,
)
from longtrain.kernels.hierarchical import fragments_launch as fragments
from longtrain.kernels.hierarchical.layout import Lens, Planes, Ring
from longtrain.kernels.tree_attention import launch as merging
from longtrain.kernels.tree_attention.reference import Causal

MAX_ROWS = 32
"""Most packed rows."""
MOST_BLOCKS = 64
"""Most blocks of a program, as in `warpgroup_operands`, which needs a Triton that has Gluon."""
NAME = "warp-group attention"
SERVED = (
    f"head dim {fragments.HEAD_DIM}, 8 bits, up to {MAX_ROWS} packed rows of {fragments.NARROW_GROUP + 1} to "
    f"{fragments.WIDE_GROUP} query heads a KV head, queries and ring both bf16 or both fp16, an NVIDIA GPU "
    "of compute capability 9.0, and a Triton that compiles the kernel and does not interpret it"
)
"""What `serves` asks for, in words."""


@dataclass(frozen=True)
class WarpGroupTile:
    """Sizes of the attention kernel and of its launch.

    Args:
        rows: packed rows: 16 or 32.
        slots: blocks of keys, and of values, that shared memory holds.
        resident: programs that run on one multiprocessor at a time: registers and shared memory let in two.

    Raises:
        ConfigError: another number of rows, or no slot.
    """

    rows: int = 16
    slots: int = 2
    resident: int = 2

    def __post_init__(self) -> None:
        if self.rows not in (16, 32) or self.slots < 1:
            raise refusal(ConfigError, f"{self}", "16 or 32 rows, one slot or more")


def serves(q_BHTD: Tensor, planes: Planes, ring: Ring, bits: int) -> bool:
    """Whether this kernel takes the call."""
    group = q_BHTD.shape[1] // planes.k_upper.shape[1]
    return ring.k.dtype == q_BHTD.dtype and takes(
        group * q_BHTD.shape[2], bits, group, q_BHTD.shape[3], q_BHTD.dtype, q_BHTD.device
    )


def takes(rows: int, bits: int, group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this kernel takes so many packed rows, of `group` query heads a KV head."""
    return (
        bits == 8
        and head_dim == fragments.HEAD_DIM
        and rows <= MAX_ROWS
        and fragments.NARROW_GROUP < group <= fragments.WIDE_GROUP
        and dtype in fragments.HALF
        and hopper_alone(device)
        and not interpreted()
        and not given_up(NAME)
    )


def hier_attention(
    q_BHTD: Tensor,
    planes: Planes,
    ring: Ring,
    lens: Lens,
    mask: Tensor | Causal | None,
    bits: int,
    scale: float,
    tile: WarpGroupTile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """See `kernels.hierarchical.attention.hier_attention`; `tile` and `splits` None: what suits the device.

    Splits are added until none has more than MOST_BLOCKS blocks of the planes.

    Returns:
        None where this Triton does not compile the kernel with the tile that is chosen here.
    """
    B, H, T, D = q_BHTD.shape
    G, N = planes.k_upper.shape[1:3]
    group = H // G
    tile = tile or tile_for(T * group)
    rings = fragments.rings_for(N)
    splits = splits or fragments.splits_for(tile.resident, B * G, rings, q_BHTD.device)
    splits = max(splits, rings + -(-N // MOST_BLOCKS))
    q_BHTD = dense_rows(q_BHTD)
    own_bits, bits_strides, of_mask = merging.mask_arguments(mask, T, lens.len_B)
    part_lse, part_out = partial_results(q_BHTD, B * G * splits * tile.rows, D)
    try:
        kernel = _kernel()
    except (ImportError, AttributeError, TypeError) as error:
        give_up(NAME, f"lacks parts of Gluon that the fast kernel {NAME} needs", error)
        return None
    with launched_on(q_BHTD):
        try:
            kernel[(B * G, splits)](
                q_BHTD, planes.k_upper, planes.k_lower, planes.v_upper, planes.v_lower,
                planes.k_step, planes.k_zero, planes.v_step, planes.v_zero,
                ring.k, ring.v, lens.len_B, lens.blocks_B, own_bits, part_out, part_lse,
                scale * LOG2E, splits, T, N, *q_BHTD.stride()[:3], *bits_strides,
                G=G, GROUP=group, OFFSET=-planes.split.lower_offset / 16, MASK=of_mask["MASK"],
                RINGS=rings, SLOTS=tile.slots, ROWS=tile.rows,
                num_warps=4, enable_fp_fusion=False, **chaining(q_BHTD.device),
            )  # fmt: skip
        except (CompilationError, PTXASError, OutOfResources, RuntimeError) as error:
            of_compiler = not isinstance(error, RuntimeError) or "PassManager" in str(error)
            if not (of_compiler and tile == tile_for(T * group)):
                raise
            give_up(NAME, f"does not compile the fast kernel {NAME}", error)
            return None
        return merging.merge(q_BHTD, part_out, part_lse, G=G, rows=tile.rows, splits=splits)


def tile_for(rows: int) -> WarpGroupTile:
    """The tile for so many packed rows."""
    return WarpGroupTile(rows=16 if rows <= 16 else MAX_ROWS)


def candidates(rows: int) -> tuple[WarpGroupTile, ...]:
    """Tiles that may beat the chosen one on another device, for `bench suite=kernels`."""
    return (replace(tile_for(rows), slots=3, resident=1),)


@lru_cache(maxsize=1)
def _kernel() -> Any:
    """The kernel; Gluon, which it is written in, changes from one Triton to the next."""
    from longtrain.kernels.hierarchical import warpgroup_kernel

    return warpgroup_kernel.attend_kernel
