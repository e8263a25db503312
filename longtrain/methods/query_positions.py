"""Samples the query positions of a packed sequence that are used as training examples, on the CPU.

Shapes: R queries of a document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.methods.set_learning import SetLearning


LEAST = 4
"""Smallest position of a query within its document."""


@dataclass(frozen=True)
class Queries:
    """Sampled query positions of one document.

    Args:
        start: start of the document in the packed sequence.
        stop: its end.
        at_R: positions, counted from `start`, ascending, int64 on the host.
        labels: labels of the document, the weight of the mean over its queries.
    """

    start: int
    stop: int
    at_R: Tensor
    labels: int


def draw(config: SetLearning, batch: Batch) -> list[Queries]:
    """Sample query positions of every long enough document with labels, evenly over the log of positions.

    Only positions before a label are drawn, since these are the ones that decoding queries from. The first is
    at twice the number of tokens that are always read, or in short documents at a quarter of the length. The
    draw depends on the batch's seed alone.
    """
    mask_T = batch.host_labels
    rng = torch.Generator().manual_seed(batch.seed)
    found = []
    for start, stop in pairwise(batch.bounds):
        labels = int(mask_T[start:stop].sum())
        first = min(2 * (config.sinks + config.window), (stop - start) // 4)
        before_R = mask_T[start + 1 : stop].nonzero()[:, 0] if labels and first >= LEAST else mask_T[:0]
        before_R = before_R[before_R >= first]
        if not len(before_R):
            continue
        low, high = math.log(int(before_R[0])), math.log(int(before_R[-1]) + 1)
        share_R = (torch.arange(config.queries) + torch.rand(config.queries, generator=rng)) / config.queries
        drawn_R = torch.searchsorted(before_R, (low + share_R * (high - low)).exp().long())
        at_R = before_R[drawn_R.clamp(max=len(before_R) - 1)].unique()
        found.append(Queries(start, stop, at_R, labels))
    return found


def far(config: SetLearning, at_R: Tensor, rows: int) -> Tensor:
    """Return the mask bool_RS of keys outside the sinks and the sliding window; each query has some.

    Args:
        config: sinks and window, which are at most an eighth and half of what a query sees.
        at_R: positions of the queries, `LEAST` or more.
        rows: S.
    """
    slot_S, at_R1 = torch.arange(rows, device=at_R.device), at_R[:, None]
    first_R1 = (at_R1 // 8).clamp(max=config.sinks)
    return (slot_S >= first_R1) & (slot_S < at_R1 - (at_R1 // 2).clamp(max=config.window))
