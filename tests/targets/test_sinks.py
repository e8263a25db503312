"""Attention sinks, by caches and scores: against a softmax with one more column, whose value is nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain.cache.arena import ArenaCache, arena_over
from longtrain.cache.base import Tree
from longtrain.decoding.engine import AUTO, PLAIN, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConflictError, TargetMismatchError
from longtrain.kernels.attention.sinks import with_sinks
from longtrain.kernels.importance import Span, importance, suffix_lse
from longtrain.methods.magicdec.choice import ScoredEntries
from longtrain.methods.policies.h2o import H2O
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.methods.sparse.config import Config
from longtrain.methods.sparse.rules import attention
from longtrain.methods.sparse.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.families import usual
from tests.helpers import Recall, attached, token_ids

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FULL = ["full_attention"] * 3
SHAPES = {"chain": TreeShape((1, 1, 1)), "tree": TreeShape((2, 4, 3)), "auto": AUTO}


def gpt_oss(layer_types=WINDOWS, window=6):
    """A target whose sinks take shares of every size."""
    shape = usual("gpt_oss", layer_types=layer_types, sliding_window=window)
    target = random_target(shape, dtype="float64")
    for index in range(3):
        target.sinks(index).normal_(1.0, 2.0, generator=torch.Generator().manual_seed(index))
    return target


def stock_of(target):
    """The same weights in transformers' own model, which computes sinks in eager attention."""
    values = target.model.config.to_dict()
    config = AutoConfig.for_model(**{**values, "sliding_window": values["sliding_window"] or 128})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")
    model.load_state_dict(target.model.state_dict())
    return model


class Silent(ArenaCache):
    """A cache that does not give the lse."""

    def __init__(self):
        pass

    def attend(self, layer, q_BHTD, *, mask, scale):
        return q_BHTD, None


def test_a_sink_is_one_more_column_of_the_softmax():
    scores, values = (torch.randn(2, 3, *size, dtype=torch.float64) for size in ((4, 9), (9, 5)))
    sinks = torch.tensor([-40.0, 0.3, 40.0], dtype=torch.float64)
    column = sinks.view(1, 3, 1, 1).expand(2, -1, 4, -1)
    expected = torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ values
    got = with_sinks(scores.softmax(-1) @ values, scores.logsumexp(-1), sinks)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    nothing = with_sinks(torch.zeros(1, 3, 1, 5), torch.full((1, 3, 1), -torch.inf), sinks)
    assert torch.equal(nothing, torch.zeros_like(nothing))


@torch.no_grad()
@pytest.mark.parametrize("window", [0, 5])
def test_sinks_are_exact_in_a_packed_row_with_any_window(window):
    """Documents end to end, each of which sees itself; transformers reads them one by one."""
    target = gpt_oss(["sliding_attention"] * 3 if window else FULL, window or 128)
    stock = stock_of(target)
    bounds, ids_T = (0, 9, 10, 24), torch.randint(2, 97, (24,), generator=torch.Generator().manual_seed(1))
    pos_T = torch.cat([torch.arange(last - first) for first, last in pairwise(bounds)])
    found = target.packed(ids_T, pos_T, bounds, OutputRequest("none", hidden=(-1,))).hidden[-1]
    for first, last in pairwise(bounds):
        expected = stock(ids_T[None, first:last]).logits[0]
        torch.testing.assert_close(target.head(found[first:last]), expected, **CLOSE)


@pytest.mark.corners
@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("arena", [False, True])
def test_trees_and_ragged_batches_are_those_of_each_path_alone(arena, fused):
    """Past the windows' edges; the sink joins once, after prefix and tail were merged."""
    target = gpt_oss()
    stock = stock_of(target)
    if fused:
        target.fuse()
    visible = torch.eye(5, dtype=torch.bool)
    for node, parent in ((1, 0), (2, 0), (3, 2), (4, 3)):
        visible[node] |= visible[parent]
    lengths = [21, 4]
    ids_BT = torch.randint(2, 97, (2, 21), generator=torch.Generator().manual_seed(1))
    tree_BN = torch.randint(2, 97, (2, 5), generator=torch.Generator().manual_seed(2))
    cache, n_B = target.new_cache(2, 48, 5), torch.tensor(lengths)
    target(TokenBatch(torch.arange(21).expand(2, -1), ids_BT, n_B=n_B), cache)
    cache.commit(None, n_B)
    if arena:
        store, cache = cache, arena_over(cache)
        cache.take(store, room=8)
    depth = torch.tensor([0, 1, 1, 2, 3])
    rows = TokenBatch(cache.len_B[:, None] + depth, tree_BN, mask=Tree(visible.expand(2, -1, -1)))
    step = target(rows, cache, outputs=OutputRequest("all"))
    for b in range(2):
        for node in range(5):
            path = [i for i in range(5) if visible[node, i]]
            whole = torch.cat([ids_BT[b, : lengths[b]], tree_BN[b, path]])
            torch.testing.assert_close(step.logits_BTV[b, node], stock(whole[None]).logits[0, -1], **CLOSE)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_text_of_drafts_is_the_plain_text_with_windows_and_sinks(shape):
    model, prompts = gpt_oss(), token_ids(*range(3, 18, 2))
    how = {"max_new_tokens": 16, "ignore_eos": True}
    plain = Engine(model).generate(prompts, shape=PLAIN, **how).tokens
    eagle3 = attached("eagle3", model, layers=[0, 1], draft_vocab_size=40)
    for parts in (Parts(draft=Recall(plain)), eagle3):
        made = Engine(model, parts).generate(prompts, shape=shape, **how)
        assert made.tokens == plain
    lookup = attached("prompt_lookup", model)
    assert Engine(model, lookup).generate(prompts, shape=SHAPES["chain"], **how).tokens == plain


@torch.no_grad()
@pytest.mark.parametrize("method", ["snapkv", "magicdec"])
def test_scores_for_eviction_have_the_sinks_denominator(monkeypatch, method):
    """Those of transformers' own attention weights, over the window's queries and a group's heads."""
    target = gpt_oss(FULL, 128)
    stock, prompt = stock_of(target), token_ids(30)[0]
    weights = stock(torch.tensor([prompt]), output_attentions=True).attentions
    seen, (of, name) = [], {"snapkv": (SnapKV, "scores"), "magicdec": (ScoredEntries, "_scores")}[method]
    scores = getattr(of, name)

    def kept(*given):
        seen.append(scores(*given))
        return seen[-1]

    monkeypatch.setattr(of, name, kept)
    if method == "snapkv":
        parts = Parts(evictor=SnapKV(Budget(12), window=8, kernel=1))
    else:
        parts = attached("magicdec", target, policy="snapkv", window=8, kernel=1, least_tokens=16)
    Engine(target, parts).generate([prompt], max_new_tokens=2, ignore_eos=True)
    found = seen[0] if method == "snapkv" else seen
    for found_BGS, of_layer in zip(found, weights, strict=True):
        expected = of_layer[0, :, -8:, :22].mean(1).unflatten(0, (2, -1)).mean(1)
        torch.testing.assert_close(found_BGS[0, :, :22].double(), expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_selection_by_attention_has_the_sinks_denominator():
    """The last token's weights, which transformers' own attention gives, summed over a group's heads."""
    target, seen = gpt_oss(FULL, 128), {}
    ids_T = torch.tensor(token_ids(30)[0])
    weights = stock_of(target)(ids_T[None], output_attentions=True).attentions
    target.packed(
        ids_T, torch.arange(30), (0, 30), OutputRequest("none", hidden=(-1,)),
        hook=lambda layer, q, k, v: seen.update({layer: (q[:, :, -1], k)}),
    )  # fmt: skip
    for layer, of_layer in enumerate(weights):
        found = attention(target, layer, *seen[layer], torch.tensor([30]))
        expected = of_layer[:, :, -1].unflatten(1, (2, -1)).sum(2)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_landmarks_are_scored_as_keys_of_their_chunk_beside_the_sink():
    """ShadowKV's share of a chunk: every key replaced by its chunk's mean, one softmax with the sink."""
    target, gen = gpt_oss(FULL, 128), torch.Generator().manual_seed(0)
    target.model.model.layers[1].self_attn.scaling = 0.4
    H, G, D = 4, 2, 16
    q_BHD, k_BGSD = (
        torch.randn(1, *size, dtype=torch.float64, generator=gen) for size in ((H, D), (G, 24, D))
    )
    keys = {"budget_tokens": 14, "sinks": 2, "window": 4, "every": 5}
    parts = SPEC.attach(None, target, Config("shadowkv", chunk=4, outliers=0.0), keys)
    cache = Engine(target, parts).new_cache(1, 24, 1)
    parts.selector.start(torch.zeros(1, 24, dtype=torch.int64), torch.tensor([24]), None, cache)
    found_GS = parts.selector.scores(1, q_BHD, k_BGSD, torch.tensor([24]))[0]
    means_GSD = k_BGSD[0].unflatten(1, (6, 4)).mean(2).repeat_interleave(4, 1)
    shares = []
    for head in range(H):
        scores_S = means_GSD[head // 2] @ q_BHD[0, head] * 0.4
        column = target.sinks(1)[head].double()[None]
        shares.append(torch.cat((scores_S, column)).softmax(0)[:24] * 4)
    expected_GS = torch.stack(shares).unflatten(0, (G, 2)).amax(1).float()
    torch.testing.assert_close(found_GS, expected_GS, rtol=1e-6, atol=1e-9)


def test_sums_of_exponentials_take_sinks_in():
    gen = torch.Generator().manual_seed(0)
    q, own = (torch.randn(3, heads, 8, dtype=torch.float64, generator=gen) for heads in (4, 2))
    keys = torch.randn(1, 7, 2, 8, dtype=torch.float64, generator=gen)
    sinks, spans = torch.tensor([-3.0, 0.0, 1.0, 9.0]), [Span((0, 3), 0, (0, 7))]
    plain = suffix_lse(q, own, keys, spans, scale=0.3)
    lse = suffix_lse(q, own, keys, spans, scale=0.3, sinks_H=sinks)
    torch.testing.assert_close(lse, (plain.exp() + sinks.double().exp()).log())
    assert (importance(q, lse, keys, spans, scale=0.3) < importance(q, plain, keys, spans, scale=0.3)).all()


def test_selected_entries_and_evicted_caches_have_sinks_too():
    """If all entries are read or kept: the plain text. With windows, entries of full layers are evicted."""
    target, prompts = gpt_oss(FULL, 128), token_ids(120, 70)
    how = {"max_new_tokens": 12, "ignore_eos": True}
    plain = Engine(target).generate(prompts, **how).tokens
    for budget in (69, 400):
        parts = attached("sparse", target, {"budget_tokens": budget}, rule="quest")
        assert budget < 400 or Engine(target, parts).generate(prompts, **how).tokens == plain
        evicts = Parts(evictor=SnapKV(Budget(budget), window=8, kernel=5))
        made = Engine(target, evicts).generate(prompts, **how)
        assert made.stats.kept_entries == [min(budget, len(prompt)) for prompt in prompts]
        assert budget < 400 or made.tokens == plain
    windows = gpt_oss()
    evicts = Parts(evictor=SnapKV(Budget(400), window=8, kernel=5))
    made = Engine(windows, evicts).generate(prompts, **how)
    assert made.tokens == Engine(windows).generate(prompts, **how).tokens


@pytest.mark.parametrize("kinds", [WINDOWS, FULL])
def test_quantised_entries_have_sinks_too(kinds):
    """The plain text while nothing is quantised; a draft's text is that of its cache where much is."""
    shape = usual("gpt_oss", layer_types=kinds, sliding_window=6, head_dim=64)
    target = random_target(shape, dtype="float64")
    for index in range(3):
        target.sinks(index).normal_(1.0, 2.0, generator=torch.Generator().manual_seed(index))
    how, chain = {"max_new_tokens": 14, "ignore_eos": True}, SHAPES["chain"]
    drafts = attached("quantspec", target, weight_bits=16)
    alone = attached("quantspec", target, draft=False)
    short, long = token_ids(90, 1, 17), token_ids(400, 5, 260)
    expected = Engine(target).generate(short, **how).tokens
    assert Engine(target, alone).generate(short, **how).tokens == expected
    made = Engine(target, drafts).generate(short, shape=chain, **how)
    assert made.tokens == expected and made.stats.tau > 3.0
    made = Engine(target, drafts).generate(long, shape=chain, **how)
    assert made.tokens == Engine(target, alone).generate(long, **how).tokens and made.stats.tau > 1.5


def test_what_cannot_serve_sinks_says_so():
    target, prompts = gpt_oss(FULL, 128), token_ids(40)
    with pytest.raises(TargetMismatchError, match="H2O sums attention without the sinks"):
        Engine(target, Parts(evictor=H2O(Budget(12)))).generate(prompts, max_new_tokens=2)
    with pytest.raises(TargetMismatchError, match="is of the family gpt_oss; LookaheadKV is built for"):
        attached("lookaheadkv", target, {"budget_tokens": 8}, lora_targets=["q", "k", "v", "o"])
    with pytest.raises(TargetMismatchError, match="learns from attention without sinks"):
        attached("specontext", target, {"budget_tokens": 8})
    with pytest.raises(ConflictError, match="attention sinks, which need the log-sum-exp"):
        Silent().attend_lse(0, torch.zeros(1, 4, 1, 8), mask=None, scale=1.0)
