"""Launches of the kernels of `fragments_kernel`: tiles, splits and partial buffers.

The tiles below were chosen on compute capability 9.0. Splits and the blocks of a warp are the same for every
number of rows, so that a row's result does not depend on it.
Shapes: see `kernels.hierarchical`; M packed rows (new tokens x query heads of a KV head).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from longtrain.errors import ConfigError, refusal
from longtrain.kernels.devices import (
    LOG2E,
    chaining,
    compiles_for,
    cores,
    given_up,
    launched_on,
    partial_results,
    shared_bytes,
)
from longtrain.kernels.hierarchical import fragments_kernel as kernels
from longtrain.kernels.hierarchical import fragments_ptx as ptx
from longtrain.kernels.hierarchical import fragments_reductions as reductions
from longtrain.kernels.hierarchical.layout import Lens, Planes, Ring
from longtrain.kernels.machine_text import laid_out, operands
from longtrain.kernels.tree_attention import launch as merging
from longtrain.kernels.tree_attention.reference import Causal

HEAD_DIM = 128
"""The supported head dim: its vectors fill the registers of a warp."""


@dataclass(frozen=True)
class FragmentTile:
    """Sizes of the attention kernel and of its launch.

    Args:
        tiles: number of tiles of 8 packed rows of a warp: 1 or 2.
        warps: warps of a program; two for each part process a block together.
        parts: number of warps that share half a block, each with 16 packed rows of its own: 1, or 2 with two
            tiles.
        stages: stages of the pipeline that loads blocks; fewer if shared memory is too small.
        resident: programs that run on one multiprocessor at a time. Registers or shared memory must not allow
            more, or some multiprocessors would get more than others.
        chunk: numbers of a merging program, and its threads: a power of two from 32 to 1024.

    Raises:
        ConfigError: two parts with one tile, whose warps would skip 8 of 16 rows, or too few warps.
    """

    tiles: int = 1
    warps: int = 4
    parts: int = 1
    stages: int = 3
    resident: int = 2
    chunk: int = 128

    def __post_init__(self) -> None:
        if self.tiles < self.parts or self.warps < 2 * self.parts:
            allowed = "two tiles where there are two parts, two warps for each part"
            raise refusal(ConfigError, f"{self}", allowed)

    @property
    def rows(self) -> int:
        """Most packed rows that the tile has room for."""
        return 8 * self.tiles * self.parts

    @property
    def blocks(self) -> int:
        """Number of cache blocks that a program processes at once (a round)."""
        return self.warps // (2 * self.parts)


TILES = {
    4: (FragmentTile(), FragmentTile(tiles=2)),
    8: (FragmentTile(warps=2, resident=3), FragmentTile(tiles=2, warps=2, resident=3)),
}
"""By bits: the first tile with room for all packed rows is used."""
WIDE_TILES = (
    FragmentTile(warps=2, stages=4),
    FragmentTile(tiles=2, warps=2, stages=4),
    FragmentTile(tiles=2, warps=4, parts=2),
)
"""The same at 8 bits for larger groups, where 8 tokens do not fit in 16 packed rows; all have the same
splits."""
MANY = 16
"""KV heads of a batch from which twice as many programs of two warps balance the device better."""
FEW_BLOCKS = 10
"""Up to so many blocks (of the cache's capacity) per split, chained launches of the first of `TILES[4]` have
two stages instead of three: queries arrive after the rounds requested before them, one fewer than the
stages."""
NARROW_GROUP, WIDE_GROUP = 2, 4
"""At 8 bits, most query heads of a KV head for `TILES` and `WIDE_TILES`.

Tiles for a larger group have no room for 8 new tokens, and a token's result must be the same alone as among
8.
"""

SERVED = (
    f"head dim {HEAD_DIM}, up to 16 packed rows, or 32 with 3 or {WIDE_GROUP} query heads a KV head at 8 "
    "bits (more heads at 4 bits alone), bf16 or fp16, an NVIDIA GPU of compute capability 8.0 or more, and a "
    "Triton that lays tensors out as the kernel needs them"
)
"""The conditions of `serves`, in words."""
HALF = (torch.bfloat16, torch.float16)
"""Supported dtypes of queries and ring."""


def serves(q_BHTD: Tensor, planes: Planes, ring: Ring, bits: int) -> bool:
    """True if these kernels support the call; else `attention_kernel` is used."""
    group = q_BHTD.shape[1] // planes.k_upper.shape[1]
    return (
        takes(group * q_BHTD.shape[2], bits, group, q_BHTD.shape[3], q_BHTD.dtype)
        and ring.k.dtype in HALF
        and torch.version.cuda is not None
        and compiles_for(q_BHTD.device)
    )


def takes(rows: int, bits: int, group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """True if these kernels support so many packed rows, with `group` query heads for each KV head."""
    if bits == 8 and group > WIDE_GROUP:
        return False
    return (
        head_dim == HEAD_DIM
        and rows <= _tiles(bits, group)[-1].rows
        and dtype in HALF
        and not given_up("attend_kernel")
    )


def hier_attention(
    q_BHTD: Tensor,
    planes: Planes,
    ring: Ring,
    lens: Lens,
    mask: Tensor | Causal | None,
    bits: int,
    scale: float,
    tile: FragmentTile | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """See `kernels.hierarchical.hier_attention`; `tile` and `splits` None: chosen for the device.

    Returns:
        None if this compiler does not give tensors the layout that the kernel's PTX needs.
    """
    B, H, T, D = q_BHTD.shape
    G, N = planes.k_upper.shape[1:3]
    group = H // G
    rings, chained = rings_for(N), chaining(q_BHTD.device)
    chosen = tile_for(T * group, bits, group, B * G)
    splits = splits or splits_for((tile or chosen).resident, B * G, rings, q_BHTD.device)
    if chained["CHAINED"] and chosen == TILES[4][0] and FEW_BLOCKS * (splits - rings) >= N:
        chosen = replace(chosen, stages=2)
    tile = tile or chosen
    q_BHTD = q_BHTD if _even(q_BHTD) else q_BHTD.contiguous()
    own_bits, bits_strides, of_mask = merging.mask_arguments(mask, T, lens.len_B)
    rows = 16 * tile.parts
    part_lse, part_out = partial_results(q_BHTD, B * G * splits * rows, D)
    out_BTHD = torch.empty((B, T, H, D), dtype=q_BHTD.dtype, device=q_BHTD.device)
    lse_BHT = torch.empty((B, H, T), dtype=torch.float32, device=q_BHTD.device)
    stages = stages_in(tile, bits, shared_bytes(q_BHTD.device))
    offset = planes.split.upper_offset if bits == 4 else -planes.split.lower_offset / 16
    with launched_on(q_BHTD):
        built = kernels.attend_kernel[(B * G, splits)](
            q_BHTD, planes.k_upper, planes.k_lower, planes.v_upper, planes.v_lower,
            planes.k_step, planes.k_zero, planes.v_step, planes.v_zero,
            ring.k, ring.v, lens.len_B, lens.blocks_B, own_bits, part_out, part_lse,
            scale * LOG2E, splits, T, N, *q_BHTD.stride()[:3],
            *bits_strides, **of_mask,
            G=G, GROUP=group, BITS=bits, OFFSET=offset,
            RINGS=rings, STAGES=stages, WARPS=tile.warps, TILES=tile.tiles, PARTS=tile.parts,
            **texts(tile.tiles, bits, offset),
            num_warps=tile.warps, enable_fp_fusion=False,
            **chained,
        )  # fmt: skip
        if not laid_out(built, tile.warps):
            return None
        reductions.merge_kernel[(B * G, -(-T * group // 8), 1024 // tile.chunk)](
            part_out, part_lse, out_BTHD, lse_BHT, T, G=G, GROUP=group, ROWS=rows,
            SPLITS=splits, CHUNK=tile.chunk, num_warps=tile.chunk // 32, **chained,
        )  # fmt: skip
    return out_BTHD.transpose(1, 2), lse_BHT


def tile_for(rows: int, bits: int, group: int, programs: int) -> FragmentTile:
    """The tile for this number of packed rows of `group` query heads, of each of `programs` KV heads."""
    tile = next(tile for tile in _tiles(bits, group) if rows <= tile.rows)
    if programs >= MANY and tile.warps == 4 and tile.parts == 1:
        return replace(tile, warps=2, stages=4, resident=4)
    return tile


def _tiles(bits: int, group: int) -> tuple[FragmentTile, ...]:
    """The tiles for these bits and this group."""
    return WIDE_TILES if bits == 8 and group > NARROW_GROUP else TILES[bits]


def candidates(rows: int, bits: int, group: int) -> tuple[FragmentTile, ...]:
    """Other tiles to measure on a new device, for `benchmarks kernels`."""
    first = tile_for(rows, bits, group, 1)
    found = [replace(first, stages=n) for n in (2, 3, 4, 5)]
    found += [replace(first, warps=2 * first.warps, resident=1), replace(first, chunk=64)]
    return tuple(tile for tile in found if tile != first)


def stages_in(tile: FragmentTile, bits: int, limit: int) -> int:
    """The tile's stages, or as many as fit into `limit` bytes: each but one buffers the blocks of a round."""
    others = 3072 * tile.warps
    return max(1, min(tile.stages, 1 + (limit - others) // (tile.blocks * bits * 4096)))


def rings_for(blocks: int) -> int:
    """Number of splits that read the ring: two for a small cache, whose other splits would wait for one."""
    return 2 if blocks <= 64 else 1


def splits_for(resident: int, programs: int, rings: int, device: torch.device) -> int:
    """Number of splits that fills the device once, those of the ring included."""
    return max(rings + 1, cores(device, otherwise=4) * resident // programs)


@lru_cache(maxsize=16)
def texts(tiles: int, bits: int, offset: float) -> dict[str, str]:
    """The kernel's PTX and its operand constraints."""
    planes = bits // 4
    return {
        "SCORES": ptx.scores_text(tiles, bits, offset),
        "SCORES_OF": operands(tiles, "r" * (2 * planes + 2 + tiles)),
        "VALUES": ptx.values_text(tiles, bits),
        "VALUES_OF": operands(2 * tiles, "r" * (2 * planes) + "f" * (4 * tiles)),
        "FINISH": ptx.finish_text(bits),
        "FINISH_OF": operands(2, "ffff"),
    }


def _even(x: Tensor) -> bool:
    """True if heads and tokens start at multiples of 16 bytes."""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(n % 8 == 0 for n in x.stride()[:-1])
