"""The choice of a joined tree's nodes: the most probable paths of draft and copy together, as on lists."""

from __future__ import annotations

import math

import pytest
import torch

from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.tree import depths, visible
from longtrain.kernels.node_choice import runs_through
from longtrain.methods.prompt_lookup.split import (
    CLASSES,
    LENGTHS,
    PRIOR,
    STEP,
    WEIGHT,
    NodeSplit,
)

SHAPE = TreeShape((2, 4, 4))
VOCAB = 4


def drafted(gen: torch.Generator, batch: int) -> TokenTree:
    """Random beams: siblings differ, and a child is at most as probable as its parent."""
    tokens, parents = torch.zeros(batch, 1).long(), torch.full((batch, 1), -1)
    score, first = torch.zeros(batch, 1), 0
    for width in SHAPE.widths:
        above = tokens.shape[1] - first
        places = torch.stack([torch.randperm(above * VOCAB, generator=gen)[:width] for _ in range(batch)])
        parent = places // VOCAB + first
        child = score.gather(1, parent) - 2 * torch.rand(batch, width, generator=gen)
        child, order = child.sort(1, descending=True)
        first = tokens.shape[1]
        tokens = torch.cat((tokens, (places % VOCAB).gather(1, order)), 1)
        parents, score = torch.cat((parents, parent.gather(1, order)), 1), torch.cat((score, child), 1)
    return TokenTree(tokens, parents, depths(SHAPE), score_BN=score)


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, the root without any."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append(() if parent < 0 else (*found[parent], token))
    return found


def expected(own, scores, copy, matched, split, row, keep) -> set[tuple[int, ...]]:
    """The `keep` most probable of all paths, by the tables, one path at a time."""
    value: dict[tuple[int, ...], float] = {}
    accepted, seen = (table[row].tolist() for table in split.rates.drafted_2BQ)
    rates, least = [], 1.0
    for hits, tries in zip(accepted, seen, strict=True):
        least = min(least, hits / tries)
        rates.append(least)
    for path, score in zip(own, scores, strict=True):
        value[path] = math.log(rates[min(CLASSES - 1, int(-score / STEP))]) + 1e-3 * score
    accepted, seen = (table[row].tolist() for table in split.rates.copied_2BL)
    total = 0.0
    for step in range(len(copy)):
        kind = sum(end < matched + step for end in LENGTHS)
        total += math.log(accepted[kind] / seen[kind])
        path = tuple(copy[: step + 1])
        value[path] = max(value.get(path, -math.inf), total)
    value.pop((), None)
    return set(sorted(value, key=lambda path: -value[path])[:keep])


def test_the_most_probable_paths_are_verified():
    gen, batch, keep = torch.Generator().manual_seed(0), 60, 13
    split = NodeSplit(batch, torch.device("cpu"))
    split.rates.copied_2BL[0] *= torch.rand(batch, len(PRIOR), generator=gen)
    split.rates.drafted_2BQ[0] *= torch.rand(batch, CLASSES, generator=gen)
    own = drafted(gen, batch)
    copy_BK, matched_B = torch.randint(VOCAB, (batch, 8), generator=gen), torch.arange(batch) % 30
    copy_BK[:20, :2] = own.tokens_BN[:20, [1, 3]]  # often along the draft's nodes
    tree, _ = split.choose(own, copy_BK, matched_B, keep)
    shared = 0
    for row in range(batch):
        found = paths(tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist())
        assert tree.depth_N[row].tolist() == [len(path) for path in found]
        assert all(parent < node for node, parent in enumerate(tree.parents_BN[row].tolist()))
        mine = paths(own.tokens_BN[row].tolist(), own.parents_BN[row].tolist())
        scores, copy = own.score_BN[row].tolist(), copy_BK[row].tolist()
        assert set(found[1:]) == expected(mine, scores, copy, int(matched_B[row]), split, row, keep)
        assert len(set(found)) == keep + 1
        copied = [path not in mine for path in found]
        assert copied == sorted(copied) and sum(copied) == int(tree.copied_B1[row])
        shared += tuple(copy[:1]) in mine
    assert shared > 10


@pytest.mark.parametrize("right", ["copy", "draft"])
def test_it_learns_from_the_texts_own_tokens(right):
    """Whichever is right gets the nodes; a finished sequence teaches nothing."""
    gen, keep = torch.Generator().manual_seed(1), 10
    split = NodeSplit(2, torch.device("cpu"))
    before = [table.clone() for table in split.tensors()]
    share = []
    for _ in range(30):
        own = drafted(gen, 2)
        copy_BK = torch.randint(VOCAB, (2, 8), generator=gen) + (VOCAB if right == "draft" else 0)
        tree, seen = split.choose(own, copy_BK, torch.tensor([5, 5]), keep)
        share.append(int(tree.copied_B1[0]))
        text = copy_BK if right == "copy" else paths_of_first(own)
        split.learn(seen, *accepted(text[:, :3], torch.tensor([3, 0])))
    assert (share[-1] > 5) if right == "copy" else (share[-1] == 0 < share[0])
    assert all(torch.equal(old[:, 1], new[:, 1]) for old, new in zip(before, split.tensors(), strict=True))
    addresses = [one.data_ptr() for one in split.tensors()]
    split.begin()
    assert all(torch.equal(old, new) for old, new in zip(before, split.tensors(), strict=True))
    assert addresses == [one.data_ptr() for one in split.tensors()]


def accepted(text_BT: torch.Tensor, n_B: torch.Tensor) -> tuple[TokenTree, Verdict]:
    """A verified chain of which all was accepted; the text's last token is the target's own."""
    batch, length = text_BT.shape
    tokens_BN = torch.cat((torch.zeros(batch, 1).long(), text_BT[:, :-1]), 1)
    path_BP = torch.zeros(batch, 12).long()
    path_BP[:, :length] = torch.arange(length)
    chain = TokenTree(tokens_BN, torch.arange(-1, length - 1).expand(batch, -1), torch.arange(length))
    return chain, Verdict(path_BP, n_B, text_BT[:, -1])


def paths_of_first(own: TokenTree) -> torch.Tensor:
    """A text along each draft's deepest first node."""
    rows = []
    for tokens, parents in zip(own.tokens_BN.tolist(), own.parents_BN.tolist(), strict=True):
        rows.append(next(path for path in paths(tokens, parents) if len(path) == SHAPE.depth))
    return torch.tensor(rows)


def test_what_is_counted():
    """Two tokens of the copy are right and the third is not: three places seen, of matches of 3, 4 and 5."""
    split = NodeSplit(1, torch.device("cpu"))
    own = drafted(torch.Generator().manual_seed(2), 1)
    copy_BK = torch.tensor([[1, 2, 3, 0, 0, 0]])
    _, seen = split.choose(own, copy_BK, torch.tensor([3]), 12)
    split.learn(seen, *accepted(torch.tensor([[1, 2, 0, 5]]), torch.tensor([4])))
    right, tried = split.rates.copied_2BL[:, 0] - WEIGHT * torch.stack((torch.tensor(PRIOR), torch.ones(10)))
    assert torch.allclose(right, torch.tensor([0.0, 0, 0, 1, 1, 0, 0, 0, 0, 0]), atol=1e-6)
    assert torch.allclose(tried, torch.tensor([0.0, 0, 0, 1, 1, 1, 0, 0, 0, 0]), atol=1e-6)
    nodes = split.rates.drafted_2BQ[1].sum() - WEIGHT * CLASSES
    depth_BN, sees_BNN = own.depth_N.expand_as(own.tokens_BN), visible(own.parents_BN)
    through = runs_through(own.tokens_BN, depth_BN, torch.tensor([[1, 2, 0, 5]]), sees_BNN)[:, 1:]
    hits = split.rates.drafted_2BQ[0].sum() - WEIGHT * (-STEP * (torch.arange(CLASSES) + 0.5)).exp().sum()
    assert abs(nodes - 10) < 1e-4 and abs(hits - through.sum()) < 1e-4
