"""Launches the Triton kernels of `kernels.row_scores`. Shapes as there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longtrain.kernels.devices import chaining, dense_rows, launched_on, width_of
from longtrain.kernels.row_scores.kernel import logits_kernel, weights_kernel


@dataclass(frozen=True)
class ScoreTile:
    """Sizes of the kernels' tiles.

    Args:
        keys: slots of a tile of keys, a power of two from 16 on.
        chunk: slots of a program, a multiple of `keys`.
        warps: warps of a program.
        stages: tiles in flight.
        block: slots of a program of the second kernel, a power of two.
    """

    keys: int = 128
    chunk: int = 1024
    warps: int = 4
    stages: int = 3
    block: int = 1024


TILE = ScoreTile()
"""One for all sizes: a row's score must not depend on how many there are."""
_SUMS = 128
"""Sums of chunks that the second kernel reads at once, always as many."""


def row_scores(
    q_BXHD: Tensor, k_BSCD: Tensor, n_B: Tensor, groups: int, scale: float, tile: ScoreTile = TILE
) -> Tensor:
    """See `kernels.row_scores.row_scores`."""
    (B, X, H, D), (S, C) = q_BXHD.shape, k_BSCD.shape[1:3]
    scores_BXS = torch.empty(B, X, S, dtype=torch.float32, device=k_BSCD.device)
    if not scores_BXS.numel():
        return scores_BXS
    q_BXHD, share = dense_rows(q_BXHD), X // C
    chunks, line = triton.cdiv(S, tile.chunk), triton.cdiv(S, 16) * 16
    logits = torch.empty(B * X * H * line, dtype=torch.float32, device=k_BSCD.device)
    sums = torch.empty(B * X * H * chunks, dtype=torch.float32, device=k_BSCD.device)
    chained = chaining(k_BSCD.device)
    with launched_on(k_BSCD):
        logits_kernel[(C, chunks, B)](
            q_BXHD, k_BSCD, n_B, logits, sums, scale, *q_BXHD.stride()[:3], *k_BSCD.stride()[:3],
            line, chunks,
            G=groups, SHARE=share, H=H, D=D, WIDTH=width_of(D),
            ROWS=max(16, triton.next_power_of_2(share * H)), KEYS=tile.keys, CHUNK=tile.chunk,
            STAGES=tile.stages, num_warps=tile.warps, **chained,
        )  # fmt: skip
        weights_kernel[(X, triton.cdiv(S, tile.block), B)](
            logits, sums, n_B, scores_BXS, line, chunks, S,
            H=H, HEADS=triton.next_power_of_2(H), CHUNK=tile.chunk, TILE=_SUMS, BLOCK=tile.block,
            num_warps=4, **chained,
        )  # fmt: skip
    return scores_BXS
