"""Launches the Triton kernels of `kernels.row_choice`. Shapes as there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longtrain.kernels.devices import chaining, dense_rows, launched_on
from longtrain.kernels.row_choice.kernel import digits_kernel, write_kernel

_LEVELS = 4


@dataclass(frozen=True)
class ChoiceTile:
    """How the slots are divided.

    Args:
        block: slots of a chunk, a power of two, at most 32768.
        warps: warps of a program.
        chunks: chunks whose counts are read at once, a power of two.
        programs: most programs for which it is taken.
    """

    block: int
    warps: int
    chunks: int = 32
    programs: int | None = None


TILES = (
    ChoiceTile(1024, 4, programs=264),
    ChoiceTile(2048, 4, programs=264),
    ChoiceTile(8192, 16, chunks=16, programs=132),
    ChoiceTile(8192, 8, chunks=16),
)
"""Chosen on an H200 at 32K and 128K slots, 8 and 32 sets; it has 132 cores."""


def tile_for(rows: int, slots: int) -> ChoiceTile:
    """The first tile that gives few enough programs, and chunks whose counts can be read at once."""
    for tile in TILES:
        chunks = triton.cdiv(slots, tile.block)
        if tile.programs is not None and chunks <= tile.chunks and rows * chunks <= tile.programs:
            return tile
    return TILES[-1]


def choose_rows(
    scores_BXS: Tensor,
    len_B: Tensor,
    out_BXK: Tensor,
    sinks: int,
    window: int,
    due_B: Tensor | None,
    tile: ChoiceTile | None = None,
) -> None:
    """See `kernels.row_choice.choose_rows`; `tile` None: what suits the sizes."""
    B, X, S = scores_BXS.shape
    rows, K = B * X, out_BXK.shape[2]
    if not rows:
        return
    tile = tile or tile_for(rows, S)
    scores_BXS = dense_rows(scores_BXS)
    chunks = max(1, triton.cdiv(S, tile.block))
    size = rows * chunks
    scratch = torch.empty(size * 513 + rows * 8, dtype=torch.int32, device=scores_BXS.device)
    counts, above, state = scratch.split((size * 512, size, rows * 8))
    due = len_B if due_B is None else due_B.view(torch.uint8)
    const = {
        "BLOCK": tile.block,
        "TILE": min(tile.chunks, triton.next_power_of_2(chunks)),
        "DUE": due_B is not None,
        "num_warps": tile.warps,
        **chaining(scores_BXS.device),
    }
    sizes = (S, X, sinks, window, K, chunks)
    strides = scores_BXS.stride()[:2]
    with launched_on(scores_BXS):
        for level in range(_LEVELS):
            digits_kernel[(rows, chunks)](
                scores_BXS, len_B, due, counts, above, state, *strides, *sizes, LEVEL=level, **const
            )
        write_kernel[(rows, chunks)](
            scores_BXS, len_B, due, counts, above, state, out_BXK, *strides, *out_BXK.stride()[:2], *sizes,
            **const,
        )  # fmt: skip
