"""The choice of rows: the kernels, interpreted, beside the twin."""

import pytest
import torch
from row_choice_cases import KINDS, SINKS, WINDOW, K, scores_of

from longtrain.kernels.row_choice import launch, reference
from longtrain.kernels.row_choice.launch import ChoiceTile

FEW, MANY = ChoiceTile(64, 1, 4), ChoiceTile(32, 1, 2)
"""Chunks whose counts are read at once, and in turns."""


@pytest.mark.parametrize(
    ("kind", "tile", "forced"),
    [
        *((kind, FEW, (SINKS, WINDOW)) for kind in KINDS),
        ("few values", MANY, (0, 0)),
        ("equal", FEW, (18, 1)),
    ],
    ids=str,
)
def test_the_sets_are_the_twins(kind, tile, forced):
    """Texts below and above the budget, slots that fill no chunk, a sequence that is not due, strides."""
    len_B = torch.tensor([150, 61, K + 1, K, 70])
    due_B = torch.tensor([True, True, True, True, False])
    scores = scores_of(kind, 5, 1, 301, seed=1)[..., :151]
    for b, length in enumerate(len_B.tolist()):
        scores[b, :, length:] = torch.nan
    own, other = torch.full((2, 5, 3, K), -1)[:, :, 1:2].unbind(0)
    launch.choose_rows(scores, len_B, own, *forced, due_B, tile)
    reference.choose_rows(scores, len_B, other, *forced, due_B)
    assert torch.equal(own, other)
