"""Best continuations: the kernels, interpreted, beside torch."""

import pytest
import torch

from longtrain.kernels import beam


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


def test_the_first_of_equal_ones():
    """Half-precision logits are often equal."""
    logits = torch.zeros(1, 2, 1500, dtype=torch.float16)
    logits[0, 1, [7, 1400]] = 2
    token, parent, score = beam.best_continuations(logits, torch.zeros(1, 2), 5, 1.0)
    assert token.tolist() == [[7, 1400, 0, 1, 2]] and parent.tolist() == [[1, 1, 0, 0, 0]]
    assert (score.diff() <= 0).all()
