"""Launches of the Triton kernels of `kernels.hierarchical`: tiles, splits and partial buffers.

The tiles below were chosen on compute capability 9.0 at head dim 128. At 8 bits, as the target reads, the
result for a token must be bit for bit the same in a step of several tokens as in plain decoding, or greedy
sequences would diverge at near ties. So there up to 32 packed rows have the same kernel and splits.

Shapes: see `kernels.hierarchical`; M packed rows (new tokens x query heads of a KV head).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longtrain.errors import ConfigError, refusal
from longtrain.kernels.devices import (
    LOG2E,
    chaining,
    dense_rows,
    interpreted,
    launched_on,
    partial_results,
    register_limit,
)
from longtrain.kernels.hierarchical import attention_kernel as kernels
from longtrain.kernels.hierarchical import fragments_launch as fragments
from longtrain.kernels.hierarchical.layout import Lens, Planes, Ring
from longtrain.kernels.tree_attention import launch as merging
from longtrain.kernels.tree_attention.reference import Causal


@dataclass(frozen=True)
class BlockTile:
    """Sizes of the attention kernel's tile and of its launch; a tile of keys is one block of the planes.

    Args:
        rows: packed rows, a power of two from 16 on.
        warps: warps of a program.
        stages: blocks in flight.
        resident: programs that run on one multiprocessor at a time.
        recent: positions of a tile of the ring, a divisor of 128.
        registers: most registers of a thread; None: the compiler's choice.
    """

    rows: int
    warps: int
    stages: int
    resident: int
    recent: int = 64
    registers: int | None = None


AnyTile = BlockTile | fragments.FragmentTile
TILES = {
    4: (
        BlockTile(rows=16, warps=4, stages=3, resident=3, registers=168),
        BlockTile(rows=32, warps=4, stages=3, resident=2),
    ),
    8: (
        BlockTile(rows=16, warps=4, stages=3, resident=3, registers=168),
        BlockTile(rows=32, warps=4, stages=3, resident=2),
    ),
}
"""By bits: the first tile with room for all packed rows is used, or else the last."""
WIDE = BlockTile(rows=16, warps=4, stages=2, resident=2)
"""The tile for heads of 256 and any number of packed rows, chosen by what the compiler makes of it."""


def hier_attention(
    q_BHTD: Tensor,
    planes: Planes,
    ring: Ring,
    lens: Lens,
    mask: Tensor | Causal | None,
    bits: int,
    scale: float,
    tile: AnyTile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.hierarchical.hier_attention`; `tile` and `splits` None: chosen for the call.

    Few rows in half precision go to `fragments_launch`; this kernel is for all others.

    Raises:
        ConfigError: a tile of `fragments_launch` for a call that its kernel does not support.
    """
    B, H, T, D = q_BHTD.shape
    G, N = planes.k_upper.shape[1:3]
    group = H // G
    few = tile if isinstance(tile, fragments.FragmentTile) else None
    fits = tile is None or (few is not None and T * group <= few.rows)
    if fits and fragments.serves(q_BHTD, planes, ring, bits):
        found = fragments.hier_attention(q_BHTD, planes, ring, lens, mask, bits, scale, few, splits)
        if found is not None:
            return found
    if few is not None:
        raise refusal(
            ConfigError,
            f"{few} for {T * group} packed rows of {group} query heads a KV head, head dim {D}, "
            f"{bits} bits, queries {q_BHTD.dtype} and ring {ring.k.dtype} on {q_BHTD.device}",
            f"{fragments.SERVED}, and as many rows as the tile has; pass tile=None",
        )
    assert tile is None or isinstance(tile, BlockTile)
    even = bits == 8 and tile is None and T * group <= TILES[bits][-1].rows
    if tile is None:  # head_dim < 128: a tile of 32 rows changes the rounding, so keep 16 for bit-exactness
        tile = TILES[bits][0] if even and D < 128 else tile_for(T * group, bits, D)
    programs = B * G * -(-T * group // tile.rows)
    fill = (B * G, min(one.resident for one in TILES[bits])) if even else (programs, tile.resident)
    splits = splits or 1 + merging.splits_for(*fill, q_BHTD.device, beside=1)
    q_BHTD = dense_rows(q_BHTD)
    own_bits, bits_strides, of_mask = merging.mask_arguments(mask, T, lens.len_B)
    part_lse, part_out, beta = partial_results(
        q_BHTD, programs * splits * tile.rows, D, programs * N * tile.rows
    )
    chained = chaining(q_BHTD.device)
    with launched_on(q_BHTD):
        kernels.attend_kernel[(programs, splits)](
            q_BHTD, planes.k_upper, planes.k_lower, planes.v_upper, planes.v_lower,
            planes.k_step, planes.k_zero, planes.v_step, planes.v_zero,
            ring.k, ring.v, lens.len_B, lens.blocks_B, own_bits, beta, part_out, part_lse,
            scale * LOG2E, splits, T, N, *q_BHTD.stride()[:3],
            *bits_strides, **of_mask,
            G=G, GROUP=group, D=D, ROWS=tile.rows, BITS=bits,
            OFFSET=planes.split.upper_offset if bits == 4 else -planes.split.lower_offset / 16,
            RECENT=tile.recent, STAGES=tile.stages,
            PORTABLE=interpreted(), num_warps=tile.warps,
            **register_limit(tile.registers), **chained,
        )  # fmt: skip
        return merging.merge(q_BHTD, part_out, part_lse, G=G, rows=tile.rows, splits=splits)


def tile_for(rows: int, bits: int, head_dim: int) -> BlockTile:
    """The tile for this number of packed rows."""
    if head_dim > 128:
        return WIDE
    return next((tile for tile in TILES[bits] if rows <= tile.rows), TILES[bits][-1])


def candidates(rows: int, bits: int, group: int, head_dim: int, dtype: torch.dtype) -> tuple[AnyTile, ...]:
    """Other tiles to measure on a new device, for `benchmarks kernels`.

    Args:
        rows: packed rows.
        bits: 4 or 8.
        group: query heads of a KV head.
        head_dim: size of a head.
        dtype: dtype of queries and ring.
    """
    general = tile_for(rows, bits, head_dim)
    if fragments.takes(rows, bits, group, head_dim, dtype):
        return (*fragments.candidates(rows, bits, group), general)
    others = (
        replace(general, warps=8, resident=1),
        replace(general, stages=2),
        replace(general, resident=3, stages=2, registers=168, recent=32),
        replace(general, resident=4),
        replace(general, rows=16, resident=3, registers=168),
    )
    return tuple(tile for tile in others if tile != general)
