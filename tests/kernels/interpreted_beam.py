"""Best continuations: the kernels, interpreted, beside torch."""

import pytest
import torch

from longtrain.kernels import beam
from longtrain.kernels.greedy import ancestors


@pytest.mark.parametrize(("nodes", "vocab", "width"), [(1, 97, 4), (3, 2100, 6), (5, 3, 12)])
def test_as_torch(nodes, vocab, width, monkeypatch):
    coins = torch.Generator().manual_seed(0)
    logits = torch.randn(2, nodes, vocab, generator=coins) * 3
    logits[0, 0, 1] = -torch.inf
    score = -torch.rand(2, nodes, generator=coins)
    got = beam.best_continuations(logits, score, width, 0.7)
    monkeypatch.setattr(beam, "kernels_serve", lambda x: False)
    expected = beam.best_continuations(logits, score, width, 0.7)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[2], expected[2])


def grown(logits, ids, widths):
    """A tree of these widths, and the scores of its last level."""
    tree, score, above, last = (
        beam.GrowingTree.of(torch.tensor([96, 5]), 1 + sum(widths)),
        torch.zeros(2, 1),
        0,
        1,
    )
    for width, of_level in zip(widths, logits, strict=True):
        of_level = of_level[:, : last - above]
        _, _, score = beam.best_continuations(of_level, score, width, 1.0, ids_V=ids, tree=tree, above=above)
        above, last = last, last + width
    return tree, score


@pytest.mark.parametrize("renamed", [False, True])
def test_a_tree_grows(renamed, monkeypatch):
    """Nodes, parents and who sees whom are torch's, level after level."""
    coins = torch.Generator().manual_seed(3)
    logits = [torch.randn(2, 5, 40, generator=coins) * 3 for _ in range(3)]
    ids = 100 + torch.randperm(40, generator=coins) if renamed else None
    got = grown(logits, ids, (2, 5, 3))
    monkeypatch.setattr(beam, "kernels_serve", lambda x: False)
    expected = grown(logits, ids, (2, 5, 3))
    assert (
        torch.equal(got[0].tokens_BN, expected[0].tokens_BN)
        and (got[0].tokens_BN[:, 0] == torch.tensor([96, 5])).all()
    )
    assert torch.equal(got[0].parents_BN, expected[0].parents_BN) and torch.equal(
        got[0].sees_BNN, expected[0].sees_BNN
    )
    assert torch.equal(got[0].sees_BNN, ancestors(got[0].parents_BN))
    torch.testing.assert_close(got[1], expected[1])


def test_the_first_of_equal_ones():
    """Half-precision logits are often equal."""
    logits = torch.zeros(1, 2, 1500, dtype=torch.float16)
    logits[0, 1, [7, 1400]] = 2
    token, parent, score = beam.best_continuations(logits, torch.zeros(1, 2), 5, 1.0)
    assert token.tolist() == [[7, 1400, 0, 1, 2]] and parent.tolist() == [[1, 1, 0, 0, 0]]
    assert (score.diff() <= 0).all()
