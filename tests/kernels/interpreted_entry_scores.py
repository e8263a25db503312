"""Scores of rows: the kernels, interpreted, beside the twin."""

import pytest
import torch

from longtrain.kernels.entry_scores import kernel, reference
from longtrain.kernels.entry_scores.kernel import ScoreTile

TILE = ScoreTile(keys=16, chunk=32, warps=1, stages=1, block=64)


@pytest.mark.parametrize(
    ("sets", "keys", "heads", "dim"), [(1, 1, 3, 32), (2, 1, 2, 24), (2, 2, 1, 32)], ids=str
)
def test_scores_are_the_twins(sets, keys, heads, dim):
    """Groups of sets with their own keys and shared ones, a text of no rows, slots that fill no tile.

    Sums in another order: 1e-5.
    """
    groups, slots = 2, 151
    q = torch.randn(3, sets * groups, heads, dim)
    k = torch.randn(3, slots + 1, keys * groups, dim)[:, 1:]
    n_B = torch.tensor([151, 33, 0])
    found = kernel.entry_scores(q, k, n_B, groups, 0.4, TILE)
    torch.testing.assert_close(found, reference.entry_scores(q, k, n_B, groups, 0.4), rtol=0, atol=1e-5)
    alone = kernel.entry_scores(q[1:2], k[1:2, :70], n_B[1:2], groups, 0.4, TILE)
    assert torch.equal(alone[0], found[1, :, :70])
