"""Which rows of a packed row are trained, and which token each of their depths predicts: host arithmetic.

Row i of a document predicts token i + 2 + k at depth k. So a label y is predicted from rows y - 2, y - 3 and
so on, as far as these are rows of its document, and what the target says of it stands in its row y - 1.
Shapes: Y labels, J depths, W labels that a chunk's rows predict, R rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longtrain.data.rows.packed_rows import cut

NONE = -1
"""In place of a row: there is none."""


@dataclass(frozen=True)
class Labels:
    """The labels of a packed row, and the ranges of rows that predict them.

    Args:
        token_Y: the labels' places in the packed row, ascending, int64.
        start_Y: the first row that may predict each label: where its document begins, or where the target
            begins to read it in a view.
        depths: J.
        ranges: (start, stop) of rows whose activations exist at once; each begins and ends with a row that
            some label is predicted from.
    """

    token_Y: Tensor
    start_Y: Tensor
    depths: int
    ranges: tuple[tuple[int, int], ...]

    def predicted(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The labels that rows start..stop predict at some depth, and the row of each depth that does.

        Returns: token_W, and row_JW counted from `start`, `NONE` where a depth's row is outside the range or
            the label's document.
        """
        ends = torch.tensor([start + 2, stop + 1 + self.depths])
        part = slice(*torch.searchsorted(self.token_Y, ends).tolist())
        token_W, first_W = self.token_Y[part], self.start_Y[part].clamp(min=start)
        row_JW = token_W - 2 - torch.arange(self.depths)[:, None]
        return token_W, torch.where((row_JW >= first_W) & (row_JW < stop), row_JW - start, NONE)


def labels_of(
    mask_T: Tensor,
    bounds: Sequence[int],
    *,
    depths: int,
    chunk_tokens: int,
) -> Labels:
    """Find what is learned of a packed row.

    Args:
        mask_T: bool, the labels, on the host.
        bounds: document bounds.
        depths: J.
        chunk_tokens: most rows of a range; 0: one range.
    """
    token_Y = mask_T.nonzero()[:, 0]
    edges = torch.tensor(bounds)
    start_Y = edges[torch.searchsorted(edges, token_Y, right=True) - 1]
    row_JY = token_Y - 2 - torch.arange(depths)[:, None]
    wanted_T = torch.zeros(len(mask_T), dtype=torch.bool)
    wanted_T[row_JY[row_JY >= start_Y]] = True
    return Labels(token_Y, start_Y, depths, tuple(cut(wanted_T.nonzero()[:, 0], chunk_tokens)))


def survivors(hit_JR: Tensor, asked_JR: Tensor) -> tuple[Tensor, Tensor]:
    """How often each depth is right where all depths before it were: hits and cases, each [J].

    Args:
        hit_JR: bool, the depth's guess for a row is the target's.
        asked_JR: bool, it predicts a label.
    """
    alive_R = torch.ones_like(asked_JR[0])
    hits, cases = [], []
    for hit_R, asked_R in zip(hit_JR, asked_JR, strict=True):
        alive_R = alive_R & asked_R
        cases.append(alive_R.sum())
        alive_R = alive_R & hit_R
        hits.append(alive_R.sum())
    return torch.stack(hits), torch.stack(cases)
