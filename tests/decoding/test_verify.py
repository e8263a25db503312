"""The accept rules keep the target's law: the code that ships, enumerated, with wrong rules as controls.

Shapes: I instances (random p and q), R rows (instance x drawn tree), N tree nodes, V vocabulary.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from longtrain.decoding.roles import ChildChoice, TokenTree, Verdict
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.decoding.tree import chain
from longtrain.decoding.verify import verify
from longtrain.errors import ConfigError

from .toys import emitted, outcomes

SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_p=0.8),
    Sampling(temperature=1.7, top_k=3),
    Sampling(temperature=1.2, top_k=4, top_p=0.7),
    Sampling(),
]
CHAIN, STAR, FORK, FULL = (-1, 0, 1), (-1, 0, 0, 0), (-1, 0, 0, 1, 1), (-1, 0, 0, 1, 2, 1, 2)
RAGGED = (-1, 0, 0, 0, 2, 2, 3)


def reference_law(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, top-k, top-p, one list at a time."""
    flat = []
    for row in logits.reshape(-1, logits.shape[-1]).tolist():
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))
        if sampling.greedy:
            flat.append([float(i == order[0]) for i in range(len(row))])
            continue
        weight = torch.tensor([row[i] / sampling.temperature for i in order], dtype=torch.float64).softmax(0)
        kept = weight[: sampling.top_k or None] / weight[: sampling.top_k or None].sum()
        count = next(n for n in range(1, len(kept) + 1) if kept[:n].sum() >= sampling.top_p - 1e-15)
        kept = kept[:count] / kept[:count].sum()
        choice = [0.0] * len(row)
        for i, p in zip(order, kept.tolist(), strict=False):
            choice[i] = p
        flat.append(choice)
    return torch.tensor(flat, dtype=torch.float64).reshape(logits.shape)


class Tables:
    """Random target and draft laws given the tokens since the root, for two levels of a tree or more."""

    def __init__(
        self, instances: int, vocab: int, sampling: Sampling, seed: int = 0, levels: int = 2
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.vocab, self.instances = vocab, instances
        shapes = [(instances, *[vocab] * level) for level in range(1, levels + 2)]
        self.logits = [2 * torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
        self.p = [reference_law(table, sampling) for table in self.logits]
        soft = sampling if not sampling.greedy else Sampling(temperature=1.0)
        self.q = [reference_law(2 * torch.randn(s, generator=gen, dtype=torch.float64), soft) for s in shapes]

    def at(self, tables: list[Tensor], row: int, path: tuple[int, ...]) -> Tensor:
        return tables[len(path)][(row, *path)]


def children(
    tables: Tables, row: int, parents: tuple[int, ...], choice: ChildChoice
) -> list[tuple[list[int], float]]:
    """Every tree that a draft of this law draws in an instance, with its probability."""
    trees = [([0], 1.0)]
    for node in range(1, len(parents)):
        grown = []
        for tokens, weight in trees:
            path, at = [], parents[node]
            while at > 0:
                path.insert(0, tokens[at])
                at = parents[at]
            q = tables.at(tables.q, row, tuple(path)).clone()
            siblings = [tokens[i] for i in range(1, node) if parents[i] == parents[node]]
            if choice is ChildChoice.POINT:
                grown.append(([*tokens, int(q.argsort(descending=True, stable=True)[len(siblings)])], weight))
                continue
            if choice is ChildChoice.NO_REPLACE:
                q[siblings] = 0
                q = q / q.sum() if q.sum() > 0 else torch.eye(len(q), dtype=q.dtype)[0]  # padding: token 0
            grown += [([*tokens, t], weight * float(q[t])) for t in range(len(q)) if q[t] > 0]
        trees = grown
    return trees


def distance(
    tables: Tables,
    parents: tuple[int, ...],
    choice: ChildChoice,
    sampling: Sampling,
    *,
    rule=verify,
    label: ChildChoice | None = None,
) -> float:
    """Largest total variation, over instances, between the law of the emitted tokens and the target's."""
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    levels, vocab = max(depth), tables.vocab
    drawn = [(i, t, w) for i in range(tables.instances) for t, w in children(tables, i, parents, choice)]
    row_R = torch.tensor([i for i, _, _ in drawn])
    tokens_RN = torch.tensor([t for _, t, _ in drawn])
    weight_R = torch.tensor([w for _, _, w in drawn], dtype=torch.float64)

    def gather(source: list[Tensor]) -> Tensor:
        nodes = []
        for node in range(len(parents)):
            path, at = [], node
            while at > 0:
                path.insert(0, tokens_RN[:, at])
                at = parents[at]
            nodes.append(source[len(path)][(row_R, *path)])
        return torch.stack(nodes, 1)

    parents_RN = torch.tensor(parents).expand(len(drawn), -1)
    tree = TokenTree(tokens_RN, parents_RN, torch.tensor(depth), label or choice, gather(tables.q))
    logits_RNV, pos_R = gather(tables.logits), torch.full((len(drawn),), 7)

    found = [torch.zeros(tables.instances, vocab**n, dtype=torch.float64) for n in range(1, levels + 2)]
    for weight, verdict in outcomes(lambda rng: rule(tree, logits_RNV, sampling, rng, pos_R), len(drawn)):
        tokens_RP = emitted(tree, verdict)
        for n in range(1, levels + 2):
            code = sum(tokens_RP[:, i] * vocab ** (n - 1 - i) for i in range(n))
            mass = weight * weight_R * (verdict.n_B == n)
            found[n - 1].view(-1).index_add_(0, row_R * vocab**n + code, mass)
    probs_IX, true_IX = found[0], tables.p[0]
    for n in range(1, levels + 1):  # a shorter text goes on by the target's law
        following = tables.p[n].reshape(tables.instances, vocab**n, vocab)
        probs_IX = (probs_IX[..., None] * following).flatten(1) + found[n]
        true_IX = (true_IX[..., None] * following).flatten(1)
    assert torch.allclose(probs_IX.sum(1), torch.ones(tables.instances, dtype=torch.float64))
    return float((probs_IX - true_IX).abs().sum(1).max() / 2)


SMALL = [
    *[(ChildChoice.POINT, parents, 5, 20) for parents in (CHAIN, STAR, FORK, FULL, RAGGED)],
    *[(ChildChoice.IID, parents, 5, 6) for parents in (CHAIN, STAR)],
    (ChildChoice.IID, FORK, 4, 3),
    *[(ChildChoice.NO_REPLACE, parents, 5, 6) for parents in (CHAIN, STAR)],
    (ChildChoice.NO_REPLACE, FORK, 4, 2),
]
LARGE = {
    (ChildChoice.IID, FULL, 3, 1): (SETTINGS[1], SETTINGS[4]),
    (ChildChoice.IID, RAGGED, 3, 1): (SETTINGS[0], SETTINGS[3]),
    (ChildChoice.NO_REPLACE, FULL, 3, 1): (SETTINGS[0], SETTINGS[4]),
    (ChildChoice.NO_REPLACE, RAGGED, 4, 1): (SETTINGS[1], SETTINGS[3]),
}
"""Trees of many outcomes, with two of the settings each."""


@pytest.mark.parametrize(
    ("choice", "parents", "vocab", "instances", "sampling"),
    [
        *[  # every second one is slow: each setting still meets five or six of the trees
            pytest.param(*case, sampling, marks=[pytest.mark.slow] if (row + place) % 2 else [])
            for row, case in enumerate(SMALL)
            for place, sampling in enumerate(SETTINGS)
        ],
        *[(*case, sampling) for case, some in LARGE.items() for sampling in some],
    ],
)
def test_law_of_the_text_is_the_targets(choice, parents, vocab, instances, sampling):
    tables = Tables(instances, vocab, sampling)
    assert distance(tables, parents, choice, sampling) <= 1e-12


def resample_from_p(
    tree: TokenTree, logits_BNV: Tensor, sampling: Sampling, rng: Rng, pos_B: Tensor
) -> Verdict:
    """Wrong: an argmax draft is accepted with p/q, and a rejected one replaced by a sample of p itself."""
    p = reference_law(logits_BNV, sampling)
    x = tree.tokens_BN[:, 1:]
    ratio = p[:, 0].gather(1, x)[:, 0] / tree.q_BNV[:, 0].gather(1, x)[:, 0]
    ok = rng.below(ratio, pos_B, "accept")
    after = rng.draw(torch.where(ok[:, None], p[:, 1], p[:, 0]), pos_B, "target")
    path = torch.stack((torch.zeros_like(after), ok.long()), 1)
    return Verdict(path, 1 + ok.long(), after)


@pytest.mark.parametrize("sampling", SETTINGS[:3], ids=str)
def test_wrong_rules_are_seen(sampling):
    """Top-k children with the p/q ratio; no-replacement draws scored with all of q; resampling from p."""
    tables = Tables(30, 5, sampling)
    assert distance(tables, STAR, ChildChoice.POINT, sampling, label=ChildChoice.IID) > 1e-3
    assert distance(tables, STAR, ChildChoice.NO_REPLACE, sampling, label=ChildChoice.IID) > 1e-3
    assert distance(tables, (-1, 0), ChildChoice.POINT, sampling, rule=resample_from_p) > 1e-3


def test_the_walk_keeps_the_law_of_sampled_trees_too():
    """Following samples of p is lossless whatever the children are."""
    sampling = Sampling(temperature=1.0)
    assert distance(Tables(4, 5, sampling), STAR, ChildChoice.IID, sampling, label=ChildChoice.POINT) <= 1e-12


def test_siblings_that_repeat_a_token():
    """A draft may waste a node on a token that a sibling already carries."""
    sampling = Sampling(temperature=1.0)
    logits = torch.randn(1, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parents, depth = torch.tensor([[-1, 0, 0, 1, 2]]), torch.tensor([0, 1, 1, 2, 2])
    tree = TokenTree(torch.tensor([[0, 2, 2, 1, 3]]), parents, depth)
    logits[:, 2] = logits[:, 1]
    paths = {}
    for weight, verdict in outcomes(lambda c: verify(tree, logits, sampling, c, torch.zeros(1)), 1):
        key = tuple(verdict.path_BP[0, : verdict.n_B[0]].tolist())
        paths[key] = paths.get(key, 0.0) + float(weight)
    p = logits.softmax(-1)[0].tolist()
    expected = {(0,): 1 - p[0][2], (0, 1): p[0][2] * (1 - p[1][1]), (0, 1, 3): p[0][2] * p[1][1]}
    assert paths == pytest.approx(expected, abs=1e-12)


def test_equal_laws_accept_everything_and_disjoint_laws_nothing():
    sampling = Sampling(temperature=1.0)
    logits = torch.randn(1, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = logits.softmax(-1)
    for choice, x in product((ChildChoice.IID, ChildChoice.NO_REPLACE), range(6)):
        tree = chain(torch.tensor([[0, x, 5 - x]]), children=choice, q_BNV=p)
        for weight, verdict in outcomes(lambda c, t=tree: verify(t, logits, sampling, c, torch.zeros(1)), 1):
            assert verdict.n_B.item() == 3 or weight.item() <= 1e-12
    logits[..., :3] = -1e9
    q = torch.tensor([0.2, 0.5, 0.3, 0, 0, 0], dtype=torch.float64).expand(1, 3, 6)
    choice = torch.zeros(6, dtype=torch.float64)
    tree = chain(torch.tensor([[0, 1, 2]]), children=ChildChoice.IID, q_BNV=q)
    for weight, verdict in outcomes(lambda c: verify(tree, logits, sampling, c, torch.zeros(1)), 1):
        assert verdict.n_B.item() == 1 or weight.item() == 0
        choice[verdict.next_B] += weight
    assert torch.allclose(choice, logits[0, 0].softmax(-1), atol=1e-12)


def test_greedy_takes_the_deepest_matching_path_and_the_lowest_id_of_a_tie():
    logits = torch.full((2, 6, 4), -1.0)
    logits[:, :, 1] = logits[:, :, 3] = 5.0  # a tie: token 1
    tokens = torch.tensor([[0, 3, 1, 2, 1, 1], [0, 3, 2, 1, 1, 1]])
    parents = torch.tensor([[-1, 0, 0, 2, 2, 4], [-1, 0, 0, 1, 1, 4]])
    tree = TokenTree(tokens, parents, torch.tensor([0, 1, 1, 2, 2, 3]))
    verdict = verify(tree, logits, Sampling(), None, torch.zeros(2))
    assert verdict.n_B.tolist() == [4, 1]
    assert verdict.path_BP.tolist() == [[0, 2, 4, 5], [0, 0, 0, 0]]
    assert verdict.next_B.tolist() == [1, 1]
    assert emitted(tree, verdict).tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]


def test_a_sampled_tree_needs_its_law():
    tree = chain(torch.tensor([[0, 1]]), children=ChildChoice.IID)
    with pytest.raises(ConfigError, match="without q_BNV"):
        verify(tree, torch.zeros(1, 2, 4), Sampling(), None, torch.zeros(1))
