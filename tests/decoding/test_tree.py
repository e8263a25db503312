"""Masks, positions and emitted tokens."""

from __future__ import annotations

import torch

from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.tree import chain, depths, positions, visible

from .toys import emitted


def test_a_node_sees_its_ancestors_and_itself():
    gen = torch.Generator().manual_seed(0)
    for n in (1, 2, 3, 17, 64, 129):
        parents = (torch.rand(3, n, generator=gen) * torch.arange(n)).long()
        parents[0] = torch.arange(n) - 1
        parents[:, 0] = -1
        expected = torch.zeros(3, n, n, dtype=torch.bool)
        for b in range(3):
            for i in range(n):
                node = i
                while node >= 0:
                    expected[b, i, node] = True
                    node = int(parents[b, node])
        assert torch.equal(visible(parents), expected)


def test_a_chain_is_causal():
    tree = chain(torch.arange(10).view(2, 5))
    assert torch.equal(visible(tree.parents_BN), torch.ones(2, 5, 5).tril().bool())
    assert positions(tree, torch.tensor([3, 10])).tolist() == [[3, 4, 5, 6, 7], [10, 11, 12, 13, 14]]
    assert positions(chain(tree.tokens_BN[:, :1]), torch.tensor([3, 10])).tolist() == [[3], [10]]


def test_depths_of_a_shape():
    shape = TreeShape((2, 3))
    assert depths(shape).tolist() == [0, 1, 1, 2, 2, 2]
    assert depths(TreeShape(())).tolist() == [0]
    assert (shape.depth, shape.n_nodes) == (2, 6)


def test_emitted_is_the_path_and_then_the_targets_token():
    tokens = torch.tensor([[9, 1, 2, 3, 4], [9, 5, 6, 7, 8]])
    tree = TokenTree(tokens, torch.tensor([[-1, 0, 0, 1, 2]] * 2), torch.tensor([0, 1, 1, 2, 2]))
    verdict = Verdict(torch.tensor([[0, 2, 4], [0, 1, 0]]), torch.tensor([3, 2]), torch.tensor([70, 80]))
    out = emitted(tree, verdict)
    assert out[0].tolist() == [2, 4, 70]
    assert out[1, :2].tolist() == [5, 80]
