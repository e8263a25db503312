"""Launches the Triton kernels of `cooperative_kernel`: tiles, splits and partial buffers.

The tiles below were chosen on compute capability 9.0. Splits are the same for every number of rows, so that a
row's result does not depend on how many rows there are.
Shapes: see `kernels.hierarchical.attention`; M packed rows (new rows x query heads of a KV head).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from longtrain.kernels.devices import LOG2E, chaining, cores, launched_on, partial_results, register_limit
from longtrain.kernels.hierarchical import cooperative_kernel as kernels
from longtrain.kernels.hierarchical import cooperative_ptx as ptx
from longtrain.kernels.hierarchical.fragments_merge import merge_kernel
from longtrain.kernels.hierarchical.layout import Lens, Planes, Ring
from longtrain.kernels.tree_attention import launch as merging
from longtrain.kernels.tree_attention.reference import Causal

MOST_ROWS = 8 * ptx.MOST_TILES
"""Most packed rows."""


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


def hier_attention(
    q_BHTD: Tensor,
    planes: Planes,
    ring: Ring,
    lens: Lens,
    mask: Tensor | Causal | None,
    scale: float,
    tile: CooperativeTile,
    splits: int | None = None,
    rings: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.hierarchical.attention.hier_attention`; `splits` None: what suits the device."""
    B, H, T, D = q_BHTD.shape
    G, N = planes.k_upper.shape[1:3]
    rows = 8 * max(2, tile.tiles)
    rings = rings or (4 if N <= 128 else 2 if N <= 512 else 1)
    splits = splits or max(rings + 1, cores(q_BHTD.device, otherwise=4) * tile.resident // (B * G))
    own_bits, bits_strides, of_mask = merging.mask_arguments(mask, T, lens.len_B)
    part_lse, part_out = partial_results(q_BHTD, B * G * splits * rows, D)
    out_BTHD = torch.empty((B, T, H, D), dtype=q_BHTD.dtype, device=q_BHTD.device)
    lse_BHT = torch.empty((B, H, T), dtype=torch.float32, device=q_BHTD.device)
    offset = -planes.split.lower_offset / 16
    chained = chaining(q_BHTD.device)
    with launched_on(q_BHTD):
        kernels.attend_kernel[(B * G, splits)](
            q_BHTD, planes.k_upper, planes.k_lower, planes.v_upper, planes.v_lower,
            planes.k_step, planes.k_zero, planes.v_step, planes.v_zero,
            ring.k, ring.v, lens.len_B, lens.blocks_B, own_bits, part_out, part_lse,
            scale * LOG2E, splits, T, N, tile.ahead, *q_BHTD.stride()[:3],
            *bits_strides, **of_mask,
            G=G, GROUP=H // G, OFFSET=offset, ROWS=rows, RECENT=tile.recent, RINGS=rings, STAGES=tile.stages,
            **texts(tile.tiles, offset), num_warps=ptx.WARPS,
            **register_limit(tile.registers), **chained,
        )  # fmt: skip
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
