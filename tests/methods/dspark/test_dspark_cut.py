"""Blocks that stop where the confidence is low: what is left out, and that texts keep their distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.decoding.engine import AUTO, Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, TreeShape
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.errors import ConfigError
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.runtime import DSparkRuntime
from longtrain.methods.dspark.spec import SPEC
from longtrain.methods.prompt_lookup.joined import with_lookup
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import TokenBatch
from tests.decoding.tape import both, tapes  # noqa: F401 (a fixture)
from tests.helpers import chi_square, token_ids

SMALL = Config(layers=[0, 2], n_layers=2, block_size=5, markov_rank=6, intermediate_size=40)
WARM = Sampling(temperature=1.0)


def few_tokens(size=7):
    """A target with a vocabulary small enough to enumerate texts."""
    shape = {**SHAPES["llama_micro"], "num_hidden_layers": 4, "vocab_size": size}
    return random_target(shape, seed=3, dtype=torch.float64)


def unsure(draft):
    """Let the confidence vary from token to token around a half."""
    with torch.no_grad():
        draft.confidence_head.proj.weight.mul_(0.3)
        draft.confidence_head.proj.bias.fill_(0.8)
    return draft


def started(draft, target, config, rows):
    """A runtime that holds one prompt in every row."""
    runtime = DSparkRuntime(draft, target, config)
    prompt = torch.tensor([token % target.info.vocab_size for token in token_ids(20)[0]]).expand(rows, -1)
    n_B = torch.full((rows,), 20)
    cache = target.new_cache(rows, 60, 40)
    pos = torch.arange(20).expand_as(prompt)
    outputs = replace(runtime.outputs, logits="none")
    step = target.forward(TokenBatch(pos, prompt, n_B=n_B), cache, outputs=outputs)
    cache.commit(None, n_B)
    runtime.start(prompt, n_B, step, cache)
    return runtime


class Forced:
    """Draws given tokens, row by row, and notes the distributions."""

    def __init__(self, *tokens):
        self.tokens, self.seen = list(tokens), []

    def draw(self, q_BV, pos_B, role):
        self.seen.append(q_BV)
        return self.tokens[len(self.seen) - 1]


def law_of_two(q1_V, q2_VV, keep_2VV, p1_V, p2_VV):
    """The distribution of two tokens if the second of two drafts is left out as `keep_2VV` says, exactly."""
    size, law = len(p1_V), torch.zeros_like(p2_VV)

    def residual(p, q):
        left = (p - q).clamp(min=0)
        return left / left.sum()

    for a in range(size):
        for b in range(size):
            weight = q1_V[a] * q2_VV[a, b]
            if not keep_2VV[0, a, b]:
                law += weight * p1_V[:, None] * p2_VV
                continue
            first = (p1_V[a] / q1_V[a]).clamp(max=1)
            law += weight * (1 - first) * residual(p1_V, q1_V)[:, None] * p2_VV
            if not keep_2VV[1, a, b]:
                law[a] += weight * first * p2_VV[a]
                continue
            second = (p2_VV[a, b] / q2_VV[a, b]).clamp(max=1)
            law[a, b] += weight * first * second
            law[a] += weight * first * (1 - second) * residual(p2_VV[a], q2_VV[a])
    return law


@torch.no_grad()
def test_by_enumeration_the_cut_keeps_the_distribution_and_one_by_later_tokens_does_not(make_draft):
    """All 49 drafts of two tokens at once, and the law of acceptance written out."""
    target = few_tokens()
    draft, size = unsure(make_draft(target, SMALL)), 7
    first, second = torch.cartesian_prod(torch.arange(size), torch.arange(size)).T
    roots, shape = torch.full((size * size,), 4), TreeShape((1, 1), ChildChoice.IID)
    for least in torch.linspace(0.1, 0.9, 33).tolist():
        config = replace(SMALL, min_confidence=least)
        rng = Forced(first, second)
        tree = started(draft, target, config, size * size).propose(roots, shape, WARM, rng)
        kept = (tree.parents_BN[:, 1:] >= 0).T.view(2, size, size)
        if kept[0].all() and kept[1].any() and not kept[1].all():
            break
    else:
        pytest.fail("no threshold cuts some of the drafts after their first token")
    assert all(len(set(kept[1, a].tolist())) == 1 for a in range(size))  # by the token before alone
    q1, q2 = rng.seen[0][0], rng.seen[1].view(size, size, size)[:, 0]
    gen = torch.Generator().manual_seed(0)
    p1, p2 = torch.rand(size, generator=gen).double(), torch.rand(size, size, generator=gen).double()
    p1, p2 = p1 / p1.sum(), p2 / p2.sum(-1, keepdim=True)
    exact = p1[:, None] * p2
    torch.testing.assert_close(law_of_two(q1, q2, kept, p1, p2), exact, rtol=1e-12, atol=1e-14)
    by_itself = torch.stack((kept[1], kept[1]))  # the first token stays where its own confidence is high
    assert (law_of_two(q1, q2, by_itself, p1, p2) - exact).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("widths", [(1,) * 5, (3, 4, 2)], ids=str)
def test_a_node_stays_where_the_product_of_the_confidences_above_it_is_high(widths, llama, make_draft):
    draft = unsure(make_draft(llama, SMALL))
    shape, roots, rng = TreeShape(widths), torch.tensor([4, 5, 6]), HashRng(1, torch.arange(3))
    runtime = started(draft, llama, replace(SMALL, min_confidence=0.3), 3)
    tree = runtime.propose(roots, shape, Sampling(), rng)
    whole = started(draft, llama, SMALL, 3).propose(roots, shape, Sampling(), rng)
    assert torch.equal(tree.tokens_BN, whole.tokens_BN)
    hidden = runtime._block(roots, runtime.cache.len_B)
    cut = 0
    for row in range(3):
        for node in range(1, whole.tokens_BN.shape[1]):
            at, product = int(whole.parents_BN[row, node]), 1.0
            depth = whole.depth_N.expand(whole.tokens_BN.shape)
            while at >= 0:
                before = draft.markov_head.markov_w1(whole.tokens_BN[row, at])
                product *= float(draft.confidence_head(hidden[row, depth[row, at]], before).sigmoid())
                at = int(whole.parents_BN[row, at])
            parent = int(whole.parents_BN[row, node]) if product >= 0.3 else -1
            assert int(tree.parents_BN[row, node]) == parent
            cut += parent < 0
    assert 0 < cut < 3 * (whole.tokens_BN.shape[1] - 1)


@pytest.mark.parametrize("least", [0.4, 1.0])
def test_greedy_texts_are_the_targets_own_and_fewer_nodes_are_verified(least, llama, make_draft, monkeypatch):
    """Chains, trees and `auto`; at 1.0 nothing is drafted, and every cycle yields one token."""
    draft = unsure(make_draft(llama, SMALL))
    engine = Engine(llama, SPEC.attach(draft, llama, SMALL, {"min_confidence": least}))
    prompts = token_ids(1, 5, 33, least=2)
    options = {"max_new_tokens": 12, "ignore_eos": True}
    plain = Engine(llama).generate(prompts, **options).tokens
    sizes, forward = [], type(llama).forward

    def watched(self, batch, *args, **kwargs):
        sizes.append(batch.ids_BT.shape[1])
        return forward(self, batch, *args, **kwargs)

    monkeypatch.setattr(type(llama), "forward", watched)
    shapes = (TreeShape((1,) * 5), TreeShape((4, 6, 6)), TreeShape((4, 4, 4), keep=9), AUTO)
    for some, tried in ((slice(0, 3), shapes), (slice(2, 3), shapes[:2])):
        for shape in tried:
            sizes.clear()
            got = engine.generate(prompts[some], shape=shape, **options)
            assert got.tokens == plain[some]
            if shape is not AUTO:
                assert shape.keep or min(sizes[1:]) < shape.n_nodes
            if least == 1.0:
                assert set(sizes[1:]) == {1} and got.stats.tau == 1
    drawn = {"sampling": Sampling(temperature=0.8, top_p=0.9, seed=3), **options}
    expected = Engine(llama).generate(prompts, **drawn).tokens
    assert engine.generate(prompts, shape=TreeShape((3, 4)), **drawn).tokens == expected


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2)])
def test_sampled_text_follows_the_targets_distribution(widths, make_draft):
    target, config = few_tokens(), replace(SMALL, min_confidence=0.4)
    engine = Engine(
        target, SPEC.attach(unsure(make_draft(target, config)), target, config, {}), limits=Limits(batch=500)
    )
    shape, sampling = TreeShape(widths, ChildChoice.IID), Sampling(temperature=1.3, seed=1)
    prompt = [token % 7 for token in token_ids(20)[0]]
    chi2, _ = chi_square(engine, prompt, shape, sampling, tokens=4, runs=500)
    assert chi2 < 42.3  # 99.9% at 18 degrees of freedom


def test_a_sampled_text_is_the_same_beside_others(llama, make_draft):
    """A cut is each sequence's own, although the longest decides how many nodes are verified."""
    parts = SPEC.attach(unsure(make_draft(llama, SMALL)), llama, SMALL, {"min_confidence": 0.3})
    engine, prompts = Engine(llama, parts), token_ids(9, 5, 33, least=2)
    how = {"max_new_tokens": 16, "ignore_eos": True, "sampling": Sampling(temperature=0.9, seed=3)}
    how["shape"] = TreeShape((1,) * 5, ChildChoice.IID)
    together = engine.generate(prompts, **how).tokens
    for number, prompt in enumerate(prompts):
        assert engine.generate([prompt], sequence_ids=[number], **how).tokens == [together[number]]


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [
        (TreeShape((1,) * 5), Sampling()),
        (TreeShape((3, 4, 2)), Sampling()),
        (TreeShape((1,) * 5, ChildChoice.IID), Sampling(temperature=0.9, top_p=0.95, seed=3)),
    ],
    ids=["chain", "tree", "sampled"],
)
def test_cycles_can_be_replayed_whatever_is_left(shape, sampling, llama, make_draft, tapes):  # noqa: F811
    """CUDA graphs: one drafts, and one for each number of nodes does the rest."""
    parts = SPEC.attach(unsure(make_draft(llama, SMALL)), llama, SMALL, {"min_confidence": 0.3})
    options = {"max_new_tokens": 14, "sampling": sampling, "ignore_eos": True}
    drafted = both(llama, parts, token_ids(30, 1, 12, least=2), shape=shape, **options)
    assert len(tapes) > 2
    if shape.children is ChildChoice.POINT:
        plain = Engine(llama).generate(token_ids(30, 1, 12, least=2), **options)
        assert drafted.tokens == plain.tokens


def test_shapes_chosen_at_run_time_with_cuts_as_graphs(llama, make_draft, tapes):  # noqa: F811
    parts = SPEC.attach(unsure(make_draft(llama, SMALL)), llama, SMALL, {"min_confidence": 0.3})
    how = {"max_new_tokens": 40, "ignore_eos": True}
    found = Engine(llama, parts, capture=True).generate(token_ids(30, 12), shape=AUTO, **how)
    assert found.tokens == Engine(llama).generate(token_ids(30, 12), **how).tokens


def test_what_a_cut_excludes(llama, make_draft):
    draft = make_draft(llama, SMALL)
    parts = SPEC.attach(draft, llama, SMALL, {"min_confidence": 0.3})
    assert with_lookup(parts, "auto") is parts
    with pytest.raises(ConfigError, match=r"method\.min_confidence=0\.3; allowed: 0 where method.heads"):
        replace(SMALL, heads="markov", min_confidence=0.3)
    with pytest.raises(ConfigError, match=r"method\.min_confidence=1\.5"):
        replace(SMALL, min_confidence=1.5)
    with pytest.raises(ConfigError, match="no inference key 'head_bits'; known: min_confidence"):
        SPEC.attach(draft, llama, SMALL, {"head_bits": 4})
