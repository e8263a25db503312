"""Chooses where the blocks of a packed sequence begin, and which of their slots learn, on the host.

A block at position p of a document is the token x_p (its anchor) and masks; slot k predicts x_{p+k+1}. It can
begin at a label whose next token is a label too, and learns up to the first token that is none.

Shapes: T tokens of a packed sequence, C positions where a block can begin, A blocks, K slots of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longtrain.data.packing.packed_sequences import stream


@dataclass(frozen=True)
class Anchors:
    """The blocks of a packed sequence, ascending.

    Args:
        place_A: positions of the anchors in the packed sequence, int64.
        start_A: first token of each one's document.
        share_A: number of positions that each block stands for, fp64.
        valid_AK: bool, the slots that learn; the first always does.
    """

    place_A: Tensor
    start_A: Tensor
    share_A: Tensor
    valid_AK: Tensor

    def __len__(self) -> int:
        return len(self.place_A)


def anchors_of(mask_T: Tensor, bounds: Sequence[int], *, slots: int, every: int, seed: int) -> Anchors:
    """Choose blocks at random: one of each `every` consecutive positions of a document that can begin one.

    Args:
        mask_T: bool, the labels, on the host; a document's first token is none.
        bounds: document bounds.
        slots: K.
        every: positions of which one is chosen; 1: all are. The last few of a document are a group too.
        seed: seed of the batch; nothing else decides the choice.

    Note: the authors draw 512 positions of a sequence of 4096, anywhere. A block counts here for all
        positions of its group, so the expected loss is that of all blocks, in documents of any length.
    """
    place_C = (mask_T[:-1] & mask_T[1:]).nonzero()[:, 0]
    document_C = torch.searchsorted(torch.tensor(bounds), place_C, right=True) - 1
    # number of each position among those of its document
    first_C = torch.searchsorted(document_C, document_C)
    number_C = torch.arange(len(place_C)) - first_C
    group_C = document_C * len(mask_T) + number_C // every
    size_A = torch.unique_consecutive(group_C, return_counts=True)[1]
    drawn_A = (torch.rand(len(size_A), dtype=torch.float64, generator=stream(seed, 3)) * size_A).long()
    chosen_A = size_A.cumsum(0) - size_A + torch.minimum(drawn_A, size_A - 1)
    place_A = place_C[chosen_A]
    label_AK = place_A[:, None] + 1 + torch.arange(slots)
    inside_AK = label_AK < len(mask_T)
    valid_AK = (inside_AK & mask_T[label_AK.clamp(max=len(mask_T) - 1)]).cumprod(1).bool()
    start_A = torch.tensor(bounds)[document_C[chosen_A]]
    return Anchors(place_A, start_A, size_A.double(), valid_AK)
