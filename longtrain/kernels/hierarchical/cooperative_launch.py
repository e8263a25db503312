"""Launches the Triton kernels of `cooperative_kernel`: tiles, splits and partial buffers.

The tiles below were chosen on compute capability 9.0. Splits are the same for every number of rows, so that a
row's result does not depend on how many rows there are.
Shapes: see `kernels.hierarchical.attention`; M packed rows (new rows x query heads of a KV head).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from torch import Tensor

from longtrain.kernels.devices import (
    LOG2E,
    chaining,
    compiles_for,
    cores,
    launched_on,
    partial_results,
    register_limit,
)
from longtrain.kernels.hierarchical import cooperative_kernel as kernels
from longtrain.kernels.hierarchical import cooperative_ptx as ptx
from longtrain.kernels.hierarchical.fragments_launch import HALF, HEAD_DIM, even, laid_out, rings_for
from longtrain.kernels.hierarchical.fragments_merge import merge_kernel
from longtrain.kernels.hierarchical.layout import Lens, Planes, Ring, Split
from longtrain.kernels.tree_attention import launch as merging
from longtrain.kernels.tree_attention.reference import Causal

MOST_ROWS = 8 * ptx.MOST_TILES
"""Most packed rows."""
SERVED = f"at 8 bits up to {MOST_ROWS} packed rows over codes split as {Split.FLOOR.value}"
"""What `serves` asks for beyond what `fragments_launch.serves` does, in words."""


@dataclass(frozen=True)
class CooperativeTile:
    """Sizes of the attention kernel and of its launch.

    Args:
        tiles: how many tiles of 8 packed rows: 1, 2 or 4.
        stages: stages of the pipeline that brings blocks.
        resident: programs that run on one multiprocessor at a time.
        recent: slots of a tile of the ring, a divisor of 128.
        ahead: blocks of a program that are asked for before the kernel in front has ended.
        registers: most registers of a thread; None: the compiler's choice.
        chunk: numbers of a merging program, a power of two up to 1024.
        merge_warps: warps of a merging program.
    """

    tiles: int = 4
    stages: int = 3
    resident: int = 2
    recent: int = 64
    ahead: int = 2
    registers: int | None = None
    chunk: int = 64
    merge_warps: int = 4


_refused: list[str] = []


def serves(q_BHTD: Tensor, planes: Planes, ring: Ring, bits: int) -> bool:
    """Whether this kernel takes the call; `attention_launch`'s other does otherwise.

    The paper's split is left to the other, as this kernel has run with it under the interpreter alone.
    """
    H, T, D = q_BHTD.shape[1:]
    group = H // planes.k_upper.shape[1]
    return (
        takes(group * T, bits, group, D, q_BHTD.dtype)
        and planes.split is Split.FLOOR
        and ring.k.dtype in HALF
        and torch.version.cuda is not None
        and compiles_for(q_BHTD.device)
    )


def takes(rows: int, bits: int, group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether this kernel takes so many packed rows, of `group` query heads a KV head, on a GPU."""
    return bits == 8 and head_dim == HEAD_DIM and rows <= MOST_ROWS and dtype in HALF and not _refused


def fits(tile: object, rows: int) -> bool:
    """Whether a tile is of this kernel and holds so many packed rows; None: one that does is chosen."""
    return tile is None or (isinstance(tile, CooperativeTile) and rows <= 8 * tile.tiles)


def tile_for(rows: int) -> CooperativeTile:
    """The tile for so many packed rows."""
    return CooperativeTile(tiles=1 if rows <= 8 else 2 if rows <= 16 else 4)


def candidates(rows: int, bits: int) -> tuple[CooperativeTile, ...]:
    """Tiles that may beat the chosen one on another device, for `bench suite=kernels`."""
    first = tile_for(rows)
    return (
        replace(first, stages=4),
        replace(first, ahead=0),
        replace(first, ahead=4),
        replace(first, chunk=32),
    )


def hier_attention(
    q_BHTD: Tensor,
    planes: Planes,
    ring: Ring,
    lens: Lens,
    mask: Tensor | Causal | None,
    bits: int,
    scale: float,
    tile: CooperativeTile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """See `kernels.hierarchical.attention.hier_attention`; `tile` and `splits` None: what suits the call.

    Returns:
        None where this compiler does not lay tensors out as the kernel's machine text takes them.
    """
    B, H, T, D = q_BHTD.shape
    G, N = planes.k_upper.shape[1:3]
    tile = tile or tile_for(T * H // G)
    rows, rings = 8 * max(2, tile.tiles), rings_for(N)
    splits = splits or max(rings + 1, cores(q_BHTD.device, otherwise=4) * tile.resident // (B * G))
    q_BHTD = q_BHTD if even(q_BHTD) else q_BHTD.contiguous()
    own_bits, bits_strides, of_mask = merging.mask_arguments(mask, T, lens.len_B)
    part_lse, part_out = partial_results(q_BHTD, B * G * splits * rows, D)
    out_BTHD = torch.empty((B, T, H, D), dtype=q_BHTD.dtype, device=q_BHTD.device)
    lse_BHT = torch.empty((B, H, T), dtype=torch.float32, device=q_BHTD.device)
    offset = -planes.split.lower_offset / 16
    chained = chaining(q_BHTD.device)
    with launched_on(q_BHTD):
        built = kernels.attend_kernel[(B * G, splits)](
            q_BHTD, planes.k_upper, planes.k_lower, planes.v_upper, planes.v_lower,
            planes.k_step, planes.k_zero, planes.v_step, planes.v_zero,
            ring.k, ring.v, lens.len_B, lens.blocks_B, own_bits, part_out, part_lse,
            scale * LOG2E, splits, T, N, tile.ahead, *q_BHTD.stride()[:3],
            *bits_strides, **of_mask,
            G=G, GROUP=H // G, OFFSET=offset, ROWS=rows, RECENT=tile.recent, RINGS=rings, STAGES=tile.stages,
            **texts(tile.tiles, offset), num_warps=ptx.WARPS,
            **register_limit(tile.registers), **chained,
        )  # fmt: skip
        if not laid_out(built, ptx.WARPS):
            _refused.append(built.hash)
            return None
        merge_kernel[(B * G, -(-T * (H // G) // 8), 1024 // tile.chunk)](
            part_out, part_lse, out_BTHD, lse_BHT, splits, T, G=G, GROUP=H // G, ROWS=rows,
            BLOCK=triton.next_power_of_2(splits), CHUNK=tile.chunk, num_warps=tile.merge_warps, **chained,
        )  # fmt: skip
    return out_BTHD.transpose(1, 2), lse_BHT


@lru_cache(maxsize=16)
def texts(tiles: int, offset: float) -> dict[str, str]:
    """The kernel's machine text and its operands."""
    return {
        "WEIGHTS": ptx.weights_text(tiles, offset),
        "WEIGHTS_OF": ptx.weights_operands(),
        "VALUES": ptx.values_text(tiles),
        "VALUES_OF": ptx.values_operands(),
    }
