"""Best continuations: the kernels, interpreted, beside torch."""

import pytest
import torch
from beam_cases import beam_case, grown

from longtrain.kernels import beam
from longtrain.kernels.greedy import ancestors


@pytest.mark.parametrize(("nodes", "vocab", "width"), [(1, 97, 4), (3, 2100, 6), (5, 3, 12)])
def test_as_torch(nodes, vocab, width, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(2, nodes, vocab, generator=rng) * 3
    logits[0, 0, 1] = -torch.inf
    score = -torch.rand(2, nodes, generator=rng)
    got = beam.best_continuations(logits, score, width, 0.7)
    monkeypatch.setattr(beam, "kernels_serve", lambda x: False)
    expected = beam.best_continuations(logits, score, width, 0.7)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[2], expected[2])


@pytest.mark.parametrize(("beyond", "renamed"), [(0, False), (3, True)])
def test_a_tree_grows(beyond, renamed, monkeypatch):
    """Nodes, parents and who sees whom are torch's, also where a level looks for more continuations."""
    logits, ids, root = beam_case(renamed)
    got, score = grown(root, logits, ids, beyond)
    monkeypatch.setattr(beam, "kernels_serve", lambda x: False)
    expected, expected_score = grown(root, logits, ids, beyond)
    assert torch.equal(got.tokens_BN, expected.tokens_BN) and torch.equal(got.tokens_BN[:, 0], root)
    assert (expected.tokens_BN[:, 1:] >= 100).all() == renamed
    assert torch.equal(got.parents_BN, expected.parents_BN)
    assert torch.equal(got.sees_BNN, expected.sees_BNN)
    assert torch.equal(got.sees_BNN, ancestors(got.parents_BN))
    torch.testing.assert_close(score, expected_score)


def test_the_first_of_equal_ones():
    """Half-precision logits are often equal."""
    logits = torch.zeros(1, 2, 1500, dtype=torch.float16)
    logits[0, 1, [7, 1400]] = 2
    token, parent, score = beam.best_continuations(logits, torch.zeros(1, 2), 5, 1.0)
    assert token.tolist() == [[7, 1400, 0, 1, 2]] and parent.tolist() == [[1, 1, 0, 0, 0]]
    assert (score.diff() <= 0).all()
