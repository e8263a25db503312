"""Greedy choices: the kernels, interpreted, beside torch."""

import pytest
import torch
from greedy_cases import trees

from longtrain.kernels import greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_first_of_the_largest(dtype):
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 40, (2, 3, 5000), generator=rng).to(dtype)
    got = greedy.argmax_rows(x)
    assert got.dtype == torch.int64 and torch.equal(got, (x == 39).int().argmax(-1))
    x[0, 1] = -torch.inf
    x[1, 2, 4321] = torch.nan
    got = greedy.argmax_rows(x)
    assert got[0, 1] == 0 and got[1, 2] == 4321


@pytest.mark.corners
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(("nodes", "vocab"), [(1, 3), (2, 1), (9, 2), (21, 3)])
def test_paths(nodes, vocab, limited, monkeypatch):
    for seed in range(4):
        best, tokens, parents, levels = trees(5, nodes, vocab, seed)
        most = 1 + torch.arange(5) % (levels + 2) if limited else None
        got = greedy.follow(best, tokens, parents, levels, most)
        with monkeypatch.context() as patch:
            patch.setattr(greedy, "runs_on", lambda device: False)
            expected = greedy.follow(best, tokens, parents, levels, most)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_tokens_of_a_chain_may_be_views():
    """Strided tokens, and parents that are one row for all."""
    tokens = torch.tensor([[7, 1], [0, 0], [5, 6], [0, 0], [3, 2], [0, 0]])[::2].T
    parents = torch.tensor([-1, 0, 1]).expand(2, 3)
    best = torch.tensor([[5, 3, 9], [6, 4, 8]])
    path, n, after = greedy.follow(best, tokens, parents, 2, None)
    assert path.tolist() == [[0, 1, 2], [0, 1, 0]] and n.tolist() == [3, 2] and after.tolist() == [9, 4]


@pytest.mark.parametrize("most", [None, 2])
def test_what_is_emitted(most, monkeypatch):
    best, tokens, parents, levels = trees(5, 21, 2, 1)
    limit = None if most is None else torch.full((5,), most)
    path, n, after = greedy.follow(best, tokens, parents, levels, limit)
    assert n.unique().numel() > 1 or most is not None
    got, expected = torch.full((2, 5, levels + 3), -1, dtype=torch.int64)
    left = torch.tensor([0, 9, 1, 9, 9])  # a text that is over, and one of which a token is left
    texts = [(torch.zeros(5).long(), left.clone(), torch.arange(5)) for _ in range(2)]
    made = [greedy.settle(tokens, (path, n, after), texts[0], got)]
    monkeypatch.setattr(greedy, "runs_on", lambda device: False)
    made.append(greedy.settle(tokens, (path, n, after), texts[1], expected))
    assert torch.equal(got, expected) and (got >= 0).all()
    for counts, (root, rest, length) in zip(made, texts, strict=True):
        assert torch.equal(counts[0], n.minimum(left)) and torch.equal(counts[1], length)
        assert torch.equal(root, after) and torch.equal(rest, left - counts[0])
    whole = greedy.follow(best, tokens, parents, levels, None)[1]
    assert torch.equal(got[:, 1], whole - 1) and ((whole > n).any() == (most is not None))


@pytest.mark.parametrize("nodes", [1, 2, 17, 70])
def test_who_sees_whom(nodes, monkeypatch):
    _, _, parents, _ = trees(3, nodes, 2, 5)
    got = greedy.ancestors(parents[:1].expand(2, -1)), greedy.ancestors(parents)
    monkeypatch.setattr(greedy, "runs_on", lambda device: False)
    assert torch.equal(got[1], greedy.ancestors(parents)) and torch.equal(got[0][1], got[1][0])
    assert got[1].dtype == torch.bool
