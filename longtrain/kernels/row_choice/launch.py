"""Launches the Triton kernels of `kernels.row_choice`. Shapes as there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longtrain.kernels.devices import chaining, dense_rows, launched_on
from longtrain.kernels.row_choice.kernel import choose_kernel, peaks_kernel, reach_kernel

_MOST_FEW = 16384
"""Most slots that one program holds at once."""


@dataclass(frozen=True)
class ChoiceTile:
    """How the slots are divided; all sizes are powers of two.

    Args:
        groups: groups of slots; at least twice the rows of a set are taken.
        columns: groups of a program.
        block: slots of a chunk.
        warps: warps of the programs of the three kernels.
    """

    groups: int = 4096
    columns: int = 128
    block: int = 4096
    warps: tuple[int, int, int] = (4, 16, 8)


TILE = ChoiceTile()
"""Chosen on an H200 at 32K and 128K slots, 8 and 32 sets."""


def choose_rows(
    scores_BXS: Tensor,
    len_B: Tensor,
    out_BXK: Tensor,
    sinks: int,
    window: int,
    due_B: Tensor | None,
    tile: ChoiceTile = TILE,
) -> None:
    """See `kernels.row_choice.choose_rows`."""
    B, X, S = scores_BXS.shape
    rows, K = B * X, out_BXK.shape[2]
    if not rows:
        return
    scores_BXS = dense_rows(scores_BXS)
    twice = triton.next_power_of_2(2 * (K - sinks - window))
    groups, few = min(max(tile.groups, twice), _MOST_FEW), min(max(2048, twice), _MOST_FEW)
    chunks = max(1, triton.cdiv(S, tile.block))
    span = max(1, min(tile.block, 8192 // triton.next_power_of_2(chunks)))
    sizes = [rows * groups, rows * chunks * tile.block, rows * chunks, rows * few]
    scratch = torch.empty(sum(sizes), dtype=torch.int32, device=scores_BXS.device)
    peaks, slots, counts, held = scratch.split(sizes)
    texts = (scores_BXS, len_B, len_B if due_B is None else due_B.view(torch.uint8))
    strides, limits = scores_BXS.stride()[:2], (X, sinks, window, K)
    const = {"DUE": due_B is not None, **chaining(scores_BXS.device)}
    with launched_on(scores_BXS):
        peaks_kernel[(rows, groups // tile.columns)](
            *texts, peaks.view(torch.uint32), *strides, S, *limits,
            GROUPS=groups, COLUMNS=tile.columns,
            TILE=min(32, triton.next_power_of_2(triton.cdiv(S, groups))), num_warps=tile.warps[0], **const,
        )  # fmt: skip
        reach_kernel[(rows, chunks)](
            *texts, peaks.view(torch.uint32), slots, counts, *strides, S, *limits, chunks,
            GROUPS=groups, BLOCK=tile.block, num_warps=tile.warps[1], **const,
        )  # fmt: skip
        choose_kernel[(rows,)](
            *texts, slots, counts, held, out_BXK, *strides, *out_BXK.stride()[:2], *limits, chunks,
            BLOCK=tile.block, CHUNKS=triton.next_power_of_2(chunks), SPAN=span, FEW=few,
            num_warps=tile.warps[2], **const,
        )  # fmt: skip
