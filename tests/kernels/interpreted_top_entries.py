"""The choice of rows: the kernels, interpreted, beside the twin."""

import pytest
import torch
from top_entries_cases import KINDS, SINKS, WINDOW, K, scores_of

from longtrain.kernels.top_entries import kernel, reference
from longtrain.kernels.top_entries.kernel import ChoiceTile

SMALL = ChoiceTile(groups=64, columns=32, block=64, warps=(1, 1, 1))


@pytest.mark.corners
@pytest.mark.parametrize("few", [2048, 64], ids=["all at once", "in turns"])
@pytest.mark.parametrize(
    ("kind", "forced"),
    [*((kind, (SINKS, WINDOW)) for kind in KINDS), ("few values", (0, 0)), ("equal", (18, 1))],
    ids=str,
)
def test_the_sets_are_the_twins(kind, forced, few, monkeypatch):
    """Texts below and above the budget, slots that fill no chunk, a sequence that is not due, strides."""
    len_B = torch.tensor([150, 61, K + 1, K, 70])
    due_B = torch.tensor([True, True, True, True, False])
    scores = scores_of(kind, 5, 1, 301, seed=1)[..., :151]
    for b, length in enumerate(len_B.tolist()):
        scores[b, :, length:] = torch.nan
    monkeypatch.setattr(kernel, "_MOST_FEW", few)
    own, other = torch.full((2, 5, 3, K), -1)[:, :, 1:2].unbind(0)
    kernel.choose_entries(scores, len_B, own, *forced, due_B, SMALL)
    reference.choose_entries(scores, len_B, other, *forced, due_B)
    assert torch.equal(own, other)
