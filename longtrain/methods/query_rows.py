"""Which query rows of a packed row are learned of: host arithmetic.

Shapes: R query rows of a document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longtrain.data.rows.batch import Batch
    from longtrain.methods.set_learning import SetLearning


LEAST = 4
"""The first row of a document that may be a query."""


@dataclass(frozen=True)
class Queries:
    """Query rows of one document.

    Args:
        start: where the document begins in the packed row.
        stop: where it ends.
        at_R: the rows, counted from `start`, ascending, int64 on the host.
        labels: labels of the document, the weight of the mean over its rows.
    """

    start: int
    stop: int
    at_R: Tensor
    labels: int


def draw(config: SetLearning, batch: Batch) -> list[Queries]:
    """Query rows of every document with labels that is long enough, evenly spread over the log of positions.

    They are rows before a label, as the rows are that a decoder asks for. They begin where there are twice as
    many rows as are read in any case, or in short documents with their last three quarters. The draw follows
    from the batch's seed.
    """
    mask_T = batch.loss_mask_T.cpu() if batch.host_mask_T is None else batch.host_mask_T
    coins = torch.Generator().manual_seed(batch.seed)
    found = []
    for start, stop in pairwise(batch.bounds):
        labels = int(mask_T[start:stop].sum())
        first = min(2 * (config.sinks + config.window), (stop - start) // 4)
        before_R = mask_T[start + 1 : stop].nonzero()[:, 0] if labels and first >= LEAST else mask_T[:0]
        before_R = before_R[before_R >= first]
        if not len(before_R):
            continue
        low, high = math.log(int(before_R[0])), math.log(int(before_R[-1]) + 1)
        share_R = (
            torch.arange(config.queries) + torch.rand(config.queries, generator=coins)
        ) / config.queries
        drawn_R = torch.searchsorted(before_R, (low + share_R * (high - low)).exp().long())
        at_R = before_R[drawn_R.clamp(max=len(before_R) - 1)].unique()
        found.append(Queries(start, stop, at_R, labels))
    return found


def far(config: SetLearning, at_R: Tensor, rows: int) -> Tensor:
    """bool_RS: rows that are not read in any case, for query rows at these positions; each has some.

    Args:
        config: sinks and window, which are at most an eighth and half of what a query sees.
        at_R: positions of the query rows, `LEAST` or more.
        rows: S.
    """
    slot_S, at_R1 = torch.arange(rows, device=at_R.device), at_R[:, None]
    first_R1 = (at_R1 // 8).clamp(max=config.sinks)
    return (slot_S >= first_R1) & (slot_S < at_R1 - (at_R1 // 2).clamp(max=config.window))
