"""Launches the Triton kernels of `kernels.tree_attention`: tiles, splits and partial buffers.

The tiles below were chosen on compute capability 9.0 at head dim 128 in half precision.

Shapes: see `kernels.tree_attention`; M packed rows (new tokens x query heads of a KV head).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from longtrain.kernels.devices import (
    LOG2E,
    chaining,
    cores,
    dense_rows,
    hopper,
    launched_on,
    partial_results,
    register_limit,
    shared_bytes,
    width_of,
)
from longtrain.kernels.tree_attention import kernel as kernels
from longtrain.kernels.tree_attention import merge_kernel as merging
from longtrain.kernels.tree_attention.reference import Causal


@dataclass(frozen=True)
class TreeTile:
    """Sizes of the attention kernel's tile and of its launch.

    Args:
        rows: packed rows, a power of two from 16 on.
        keys: positions of a tile, a power of two from 16 on.
        warps: warps of a program.
        stages: tiles in flight.
        resident: programs that run on one multiprocessor at a time.
        bulk: True to load tiles by the tensor memory accelerator (compute capability 9.0 or more).
        registers: most registers of a thread; None: the compiler's choice.
        ahead: tiles of each split that are prefetched before the preceding kernel has ended.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int
    bulk: bool = False
    registers: int | None = None
    ahead: int = 0


TILES = (
    TreeTile(rows=16, keys=64, warps=4, stages=4, resident=2, bulk=True, ahead=1),
    TreeTile(rows=32, keys=64, warps=4, stages=3, resident=2, bulk=True),
    TreeTile(rows=64, keys=64, warps=4, stages=3, resident=2, bulk=True),
    TreeTile(rows=128, keys=64, warps=8, stages=3, resident=1, bulk=True),
)
"""In half precision: the first tile with room for all packed rows is used, or else one of the last two.

All have key tiles of one size, and on compute capability 9.0 products of 16 and of 64 rows round alike: with
the same splits a packed row's result is bit for bit the same in all tiles.
"""
WIDE_TILES = tuple(
    TreeTile(rows=rows, keys=32, warps=8, stages=3, resident=2 if rows < 64 else 1, bulk=True)
    for rows in (16, 32, 64)
)
"""For head dims above 128, likewise; larger tiles would not fit the registers."""
FLOAT = TreeTile(rows=16, keys=32, warps=4, stages=2, resident=2)
"""In fp32, whose products are plain multiply-adds."""
FEW_ROWS = 16
"""Most tokens of a step, over all sequences, whose results are bit for bit those of plain decoding, so that a
verified token is the one that plain decoding gives; equal to `small_linear.MAX_ROWS`. With more tokens a
faster path is used, whose results differ by rounding."""
CHUNK = 128
"""Numbers and threads of a merging program; interpreted ones have all rows, as each starts slowly."""
_INTERPRETED = 4
"""Multiprocessors of the device when kernels are interpreted: enough to split, few enough to be fast."""


def tree_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    len_B: Tensor,
    mask: Tensor | Causal | None,
    scale: float,
    base: int,
    splits: int | None,
    tile: TreeTile | None = None,
    *,
    nodes: int | None = None,
    window: int = 0,
    depth_BT: Tensor | None = None,
    dropped_B: Tensor | None = None,
    first_BG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.tree_attention.tree_attention`; `tile` None: chosen by the number of packed rows."""
    B, H, T, D = q_BHTD.shape
    G = k_BGSD.shape[1]
    group = H // G
    nodes = T if nodes is None else nodes
    few = tile is None and mask is not None and nodes == T and B * T <= FEW_ROWS
    tile = tile or tile_for(T * group, k_BGSD.dtype, D)
    tiles = -(-T * group // tile.rows)
    if splits is None:
        like = tile_for(group, k_BGSD.dtype, D) if few else tile
        rows = group if few else T * group
        splits = splits_for(B * G * -(-rows // like.rows), like.resident, q_BHTD.device)
    alone = few and isinstance(mask, Tensor) and T > 1
    width = width_of(D)
    q_BHTD = dense_rows(q_BHTD)
    bits, bits_strides, of_mask = mask_arguments(mask, nodes, len_B)
    depth = len_B if depth_BT is None else dense_rows(depth_BT)
    first = next(x for x in (first_BG, dropped_B, len_B) if x is not None)
    programs = B * G * tiles
    part_lse, part_out, state = partial_results(
        q_BHTD, programs * splits * tile.rows, width, programs * 2 * tile.rows * tile.keys if alone else 0
    )
    const = {"G": G, "GROUP": group, "D": D, "WIDTH": width, "ROWS": tile.rows}
    const |= {"WINDOW": window, "DROPPED": dropped_B is not None, "PER_HEAD": first_BG is not None}
    copies = hopper(q_BHTD.device) or q_BHTD.device.type == "cpu"
    bulk = tile.bulk and width == D and copies and _even(k_BGSD, v_BGSD)
    side_by_side = k_BGSD.stride(2) == v_BGSD.stride(2) == width
    chained = chaining(q_BHTD.device)
    buffers = (k_BGSD, v_BGSD) if first_BG is None else (k_BGSD[0, 0][None, None], v_BGSD[0, 0][None, None])
    k_tiles, v_tiles = (_descriptor(x, tile) for x in buffers) if bulk else buffers
    with launched_on(q_BHTD):
        kernels.attend_kernel[(programs, splits)](
            q_BHTD, k_BGSD, v_BGSD, k_tiles, v_tiles, len_B, first, bits, depth, part_out, part_lse, state,
            scale * LOG2E, splits, T, nodes, base,
            *q_BHTD.stride()[:3], *k_BGSD.stride()[:3], *v_BGSD.stride()[:3],
            *bits_strides, depth.stride(0),
            **const, **of_mask, KEYS=tile.keys, BULK=bulk, STAGES=_stages(tile, width, k_BGSD),
            AHEAD=tile.ahead if bulk and side_by_side else 0, ALONE=alone,
            num_warps=tile.warps, **register_limit(tile.registers), **chained,
        )  # fmt: skip
        if alone:
            kernels.finish_kernel[(B * G * T * 2,)](
                q_BHTD, k_BGSD, v_BGSD, len_B, first, bits, part_out, part_lse, state, scale * LOG2E,
                splits, T, base,
                *q_BHTD.stride()[:3], *k_BGSD.stride()[:3], *v_BGSD.stride()[:3], *bits_strides,
                **const, KEYS=tile.keys, OWN=max(16, triton.next_power_of_2(group)),
                num_warps=4, **chained,
            )  # fmt: skip
        return merge(q_BHTD, part_out, part_lse, G=G, rows=tile.rows, splits=splits)


def tree_bits(visible_BTN: Tensor) -> Tensor:
    """See `kernels.tree_attention.tree_bits`."""
    B, T, N = visible_BTN.shape
    words, rows = triton.cdiv(N, 64), 16
    bits_BTW = torch.empty((B, T, words), dtype=torch.int64, device=visible_BTN.device)
    with launched_on(bits_BTW):
        kernels.bits_kernel[(B, triton.cdiv(T, rows), words)](
            visible_BTN.view(torch.uint8), bits_BTW, *visible_BTN.stride(), T, N,
            ROWS=rows, num_warps=1, **chaining(bits_BTW.device),
        )  # fmt: skip
    return bits_BTW


def merge(
    q_BHTD: Tensor, part_out: Tensor, part_lse: Tensor, *, G: int, rows: int, splits: int
) -> tuple[Tensor, Tensor]:
    """Merge partial results to out_BHTD and lse_BHT, of `splits` programs per tile of `rows` packed rows.

    A query's heads are contiguous in memory, as the next matrix product requires.
    """
    B, H, T, D = q_BHTD.shape
    out_BTHD = torch.empty((B, T, H, D), dtype=q_BHTD.dtype, device=q_BHTD.device)
    lse_BHT = torch.empty((B, H, T), dtype=torch.float32, device=q_BHTD.device)
    chained = chaining(q_BHTD.device)
    numbers = T * (H // G) * (width := width_of(D))
    chunk = CHUNK if q_BHTD.device.type == "cuda" else triton.next_power_of_2(numbers)
    merging.merge_kernel[(B * G, triton.cdiv(numbers, chunk))](
        part_out, part_lse, out_BTHD, lse_BHT, T,
        G=G, GROUP=H // G, D=D, WIDTH=width, ROWS=rows, SPLITS=splits, CHUNK=chunk,
        num_warps=CHUNK // 32, **chained,
    )  # fmt: skip
    return out_BTHD.transpose(1, 2), lse_BHT


def mask_arguments(
    mask: Tensor | Causal | None, nodes: int, otherwise: Tensor
) -> tuple[Tensor, tuple[int, ...], dict[str, int]]:
    """Kernel arguments for a mask among new tokens: bits, their strides, and the constants MASK and WORDS.

    Args:
        mask: see `kernels.tree_attention.tree_attention`.
        nodes: nodes of a tree.
        otherwise: a tensor to pass if there are no bits.
    """
    if isinstance(mask, Tensor):
        return mask, mask.stride()[:2], {"MASK": 2, "WORDS": -(-nodes // 64)}
    return otherwise, (0, 0), {"MASK": 0 if mask is None else 1, "WORDS": 0}


def tile_for(rows: int, dtype: torch.dtype, head_dim: int) -> TreeTile:
    """The tile for this number of packed rows."""
    if dtype == torch.float32:
        return FLOAT
    tiles = TILES if head_dim <= 128 else WIDE_TILES
    some = [tile for tile in tiles if rows <= tile.rows] or tiles[-2:]
    return min(some, key=lambda tile: (-(-rows // tile.rows) * tile.rows, -tile.rows))


def candidates(rows: int) -> tuple[TreeTile, ...]:
    """Tiles in half precision that may beat the chosen one on another device, for `benchmarks kernels`."""
    first = tile_for(rows, torch.bfloat16, 128)
    if first.rows == 16:
        return (
            replace(first, stages=6),
            replace(first, ahead=0),
            replace(first, keys=128, stages=3),
            replace(first, resident=2, stages=3),
            replace(first, bulk=False, stages=3),
        )
    if first.rows == 32:
        return (
            replace(first, stages=6, resident=1),
            replace(first, keys=128, stages=3, resident=1),
            replace(first, bulk=False),
        )
    return tuple(tile for tile in TILES[2:] if tile != first)


def splits_for(programs: int, resident: int, device: torch.device, *, beside: int = 0) -> int:
    """Number of splits with which `programs` fill the device once; a multiple of 16 if above that.

    It is the same for every length.

    Args:
        programs: number of programs that are split.
        resident: programs that run on one multiprocessor at a time.
        device: the device that they run on.
        beside: splits for other work on the device, which are not part of the result.
    """
    fit = max(1, cores(device, otherwise=_INTERPRETED) * resident // programs - beside)
    return fit if fit < 16 else fit // 16 * 16


def _stages(tile: TreeTile, width: int, k_BGSD: Tensor) -> int:
    """Number of tiles in flight, fewer if the device has too little shared memory."""
    limit = shared_bytes(k_BGSD.device)
    row = width * k_BGSD.element_size()
    return max(1, min(tile.stages, (limit - 2048 - tile.rows * row) // (2 * tile.keys * row)))


def _even(*tensors: Tensor) -> bool:
    """True if heads and tokens start at multiples of 16 bytes, as bulk copies require."""
    return all(
        x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:-1])
        for x in tensors
    )


def _descriptor(x_BGSD: Tensor, tile: TreeTile) -> Any:
    """Descriptor of the tensor memory accelerator for tiles of positions."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x_BGSD, [*x_BGSD.shape], [*x_BGSD.stride()], [1, 1, tile.keys, x_BGSD.shape[3]])
