"""Finds which positions of a packed sequence are trained and which label each depth predicts, on the host.

Position i of a document predicts token i + 2 + k at depth k. So a label y is predicted from positions y - 2,
y - 3 and so on within its document, and the target's distribution of it is at position y - 1.

Shapes: Y labels, J depths, W labels that a chunk's positions predict, R positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longtrain.data.packing.packed_sequences import cut, to_device

NONE = -1
"""Stands for no position."""


@dataclass(frozen=True)
class Labels:
    """The labels of a packed sequence, and the ranges of positions that predict them.

    Args:
        token_Y: positions of the labels in the packed sequence, ascending, int64.
        start_Y: first position that may predict each label, which is the start of its document.
        depths: J.
        ranges: (start, stop) of positions whose activations exist at once; each begins and ends with a
            position that predicts some label.
    """

    token_Y: Tensor
    start_Y: Tensor
    depths: int
    ranges: tuple[tuple[int, int], ...]

    def predicted(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Find the labels that positions start..stop predict, and the position that does so at each depth.

        Returns:
            token_W, and row_JW counted from `start`, `NONE` where a depth's position is outside the range or
                the label's document; both on `device`.
        """
        ends = torch.tensor([start + 2, stop + 1 + self.depths])
        part = slice(*torch.searchsorted(self.token_Y, ends).tolist())
        pair_2W = torch.stack((self.token_Y[part], self.start_Y[part].clamp(min=start)))
        token_W, first_W = to_device(pair_2W, device)
        row_JW = token_W - 2 - torch.arange(self.depths, device=device)[:, None]
        return token_W, torch.where((row_JW >= first_W) & (row_JW < stop), row_JW - start, NONE)


def labels_of(
    mask_T: Tensor,
    bounds: Sequence[int],
    *,
    depths: int,
    chunk_tokens: int,
) -> Labels:
    """Find the labels of a packed sequence and the positions that predict them.

    Args:
        mask_T: bool, the labels, on the host.
        bounds: document bounds.
        depths: J.
        chunk_tokens: most positions of a range; 0: one range.
    """
    token_Y = mask_T.nonzero()[:, 0]
    edges = torch.tensor(bounds)
    start_Y = edges[torch.searchsorted(edges, token_Y, right=True) - 1]
    row_JY = token_Y - 2 - torch.arange(depths)[:, None]
    wanted_T = torch.zeros(len(mask_T), dtype=torch.bool)
    wanted_T[row_JY[row_JY >= start_Y]] = True
    return Labels(token_Y, start_Y, depths, tuple(cut(wanted_T.nonzero()[:, 0], chunk_tokens)))


def survivors(hit_JR: Tensor, asked_JR: Tensor) -> tuple[Tensor, Tensor]:
    """Count positions that are correct at each depth and all before it: hits and cases, each [J].

    Args:
        hit_JR: bool, the prediction at this depth and position is the target's.
        asked_JR: bool, it predicts a label.
    """
    before_JR = torch.cat((torch.ones_like(hit_JR[:1]), hit_JR[:-1]))
    alive_JR = (asked_JR & before_JR).cumprod(0)
    return (alive_JR * hit_JR).sum(1), alive_JR.sum(1)
