"""Nodes that look-up adds to a draft's tree: the text keeps the target's law, enumerated.

Shapes: R rows (instance x drawn tree), N tree nodes, K copied tokens, P path, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longtrain.decoding.roles import ChildChoice, TokenTree, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.verify import verify
from longtrain.methods.prompt_lookup.joined import with_copy

from .test_verify import SETTINGS, Tables, children
from .toys import emitted, outcomes

FEW = 3
"""Tokens of the vocabulary."""


def joined_trees(tables: Tables, widths: tuple[int, ...], copied: int, choice: ChildChoice):
    """Every joined tree with its instance and probability; the copy of an instance is fixed."""
    shape = TreeShape(widths, choice, copied=copied)
    parents, depth, first = [-1], [0], 0
    for level, width in enumerate(widths, 1):
        above = len(parents) - first
        parents += [first + i * above // width for i in range(width)]
        first, depth = len(parents) - width, depth + [level] * width
    drawn = [
        (i, tokens, weight)
        for i in range(tables.instances)
        for tokens, weight in children(tables, i, tuple(parents), choice)
    ]
    gen = torch.Generator().manual_seed(4)
    copy_IK = torch.randint(FEW, (tables.instances, shape.depth), generator=gen)
    row_R = torch.tensor([i for i, _, _ in drawn])
    own = TokenTree(
        torch.tensor([tokens for _, tokens, _ in drawn]),
        torch.tensor(parents).expand(len(drawn), -1),
        torch.tensor(depth),
        choice,
    )
    tree = with_copy(own, copy_IK[row_R], shape)
    assert tree.tokens_BN.shape[1] == shape.n_nodes and tree.first_copied == len(parents)
    return tree, row_R, torch.tensor([weight for _, _, weight in drawn], dtype=torch.float64), shape.depth


def at_nodes(tree: TokenTree, row_R: Tensor, tables: list[Tensor]) -> Tensor:
    """Each node's entry of the tables, by the tokens from the root to it, [R, N, V]."""
    rows = []
    for row, tokens, parents in zip(
        row_R.tolist(), tree.tokens_BN.tolist(), tree.parents_BN.tolist(), strict=True
    ):
        nodes = []
        for node in range(len(tokens)):
            path, at = [], node
            while at > 0:
                path.insert(0, tokens[at])
                at = parents[at]
            nodes.append(tables[len(path)][(row, *path)])
        rows.append(torch.stack(nodes))
    return torch.stack(rows)


def distance(widths, copied, choice, sampling, *, wrong: bool = False) -> float:
    """Largest total variation, over instances, between the law of the text and the target's."""
    levels = len(widths) + copied
    tables = Tables(2, FEW, sampling, levels=levels)
    tree, row_R, weight_R, depth = joined_trees(tables, widths, copied, choice)
    tree = replace(tree, q_BNV=at_nodes(tree, row_R, tables.q))
    if wrong:  # the copied nodes taken for drawn ones
        tree = replace(tree, copied=0)
    logits_RNV, pos_R = at_nodes(tree, row_R, tables.logits), torch.full_like(row_R, 7)
    found = [torch.zeros(2, FEW**n, dtype=torch.float64) for n in range(1, levels + 2)]

    def judged(rng):
        return verify(tree, logits_RNV, sampling, rng, pos_R, depth=depth)

    for weight, verdict in outcomes(judged, len(row_R)):
        tokens_RP = emitted(tree, verdict)
        for n in range(1, levels + 2):
            code = sum(tokens_RP[:, i] * FEW ** (n - 1 - i) for i in range(n))
            mass = weight * weight_R * (verdict.n_B == n)
            found[n - 1].view(-1).index_add_(0, row_R * FEW**n + code, mass)
    probs_IX, true_IX = found[0], tables.p[0]
    for n in range(1, levels + 1):  # a shorter text goes on by the target's law
        following = tables.p[n].reshape(2, FEW**n, FEW)
        probs_IX = (probs_IX[..., None] * following).flatten(1) + found[n]
        true_IX = (true_IX[..., None] * following).flatten(1)
    assert torch.allclose(probs_IX.sum(1), torch.ones(2, dtype=torch.float64))
    return float((probs_IX - true_IX).abs().sum(1).max() / 2)


@pytest.mark.corners
@pytest.mark.parametrize("sampling", [SETTINGS[0], SETTINGS[2], SETTINGS[4]], ids=str)
@pytest.mark.parametrize(
    ("widths", "copied", "choice"),
    [
        *[((1,), 1, choice) for choice in ChildChoice],
        *[((2,), 1, choice) for choice in ChildChoice],
        ((1,), 2, ChildChoice.IID),
        ((1, 1), 1, ChildChoice.IID),
        ((1, 1), 1, ChildChoice.NO_REPLACE),
        ((1, 2), 1, ChildChoice.POINT),
    ],
    ids=str,
)
def test_law_of_the_text_is_the_targets(widths, copied, choice, sampling):
    assert distance(widths, copied, choice, sampling) <= 1e-12


def test_copied_nodes_taken_for_drawn_ones_are_seen():
    assert distance((1,), 1, ChildChoice.IID, Sampling(temperature=1.0), wrong=True) > 1e-3


def test_the_copy_runs_through_the_drafts_nodes():
    """A chain that agrees with it for two tokens, one that does not at all, and a tree."""
    copy_BK = torch.tensor([[5, 6, 7, 8, 9]] * 2)
    tokens_BN = torch.tensor([[0, 5, 6, 1], [0, 1, 6, 7]])
    parents_BN, depth_N = torch.tensor([[-1, 0, 1, 2]] * 2), torch.arange(4)
    tree = with_copy(TokenTree(tokens_BN, parents_BN, depth_N), copy_BK, TreeShape((1, 1, 1), copied=2))
    assert tree.tokens_BN[:, 4:].tolist() == [[7, 8], [5, 6]] and tree.first_copied == 4
    assert tree.parents_BN[:, 4:].tolist() == [[2, 4], [0, 4]]
    assert tree.depth_N[:, 4:].tolist() == [[3, 4], [1, 2]]
    tokens_BN = torch.tensor([[0, 4, 5, 6, 6, 7], [0, 4, 6, 5, 5, 5]])
    parents_BN, depth_N = torch.tensor([[-1, 0, 0, 1, 2, 4]] * 2), torch.tensor([0, 1, 1, 2, 2, 3])
    tree = with_copy(TokenTree(tokens_BN, parents_BN, depth_N), copy_BK, TreeShape((2, 2, 1), copied=2))
    assert tree.tokens_BN[:, 6:].tolist() == [[8, 9], [5, 6]]
    assert tree.parents_BN[:, 6:].tolist() == [[5, 6], [0, 6]]
    assert tree.depth_N[:, 6:].tolist() == [[4, 5], [1, 2]]


def test_shapes_with_copied_nodes():
    shape = TreeShape((2, 4), copied=5)
    assert (shape.n_nodes, shape.n_expanded, shape.depth, shape.is_chain) == (12, 7, 7, False)
    assert shape.drafted == TreeShape((2, 4)) and TreeShape((), copied=3).is_chain
    assert not TreeShape((1, 1), copied=1).is_chain and TreeShape((), copied=3).depth == 3
