"""The evictor: scores as in training, budgets, batches, and an engine that is left alone where all fits."""

from __future__ import annotations

from dataclasses import replace

import lookahead_equations as equations
import pytest
import torch

from longtrain import methods
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget, PromptRun
from longtrain.methods import policies
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.runtime import LookaheadTokens
from longtrain.methods.policies.base import Scorer
from longtrain.targets.step import OutputRequest, TokenBatch

CONFIG = Config(n_lookahead=5, lora_rank=3, lora_alpha=6.0)
LENGTHS = [31, 12, 50]


def evictor(target, module, config=CONFIG, **keys):
    return methods.get("lookaheadkv").attach(module, target, config, keys or {"budget_tokens": 8}).evictor


def prompts(target, lengths=LENGTHS, seed=2):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(2, target.info.vocab_size, (n,), generator=gen) for n in lengths]


def prefilled(target, texts, one):
    lengths = [len(text) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    cache, n = target.new_cache(len(lengths), max(lengths), 0), torch.tensor(lengths)
    pos, hook = torch.arange(max(lengths)).expand(len(lengths), -1), one.hook(lengths)
    target.forward(TokenBatch(pos, ids, n_B=n), cache, outputs=OutputRequest("none"), hook=hook)
    cache.commit(None, n)
    return PromptRun(target, cache, tuple(lengths), ids, n, ids[:, 0], watched=hook)


@pytest.mark.corners
@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "windows of 3"])
def test_scores_of_a_batch_are_those_of_the_equations(three_layers, make_module, family, window):
    config = replace(CONFIG, suffix_window=window)
    target = equations.exact(three_layers(family))
    module = make_module(target, config)
    texts, one = prompts(target), evictor(target, module, config)
    got = one.scores(prefilled(target, texts, one))
    assert got.shape == (
        len(target.info.full_layers),
        3,
        target.info.n_kv_heads,
        max(LENGTHS),
    ) and isinstance(one, Scorer)
    for b, ids in enumerate(texts):
        outputs = equations.predicted(target, ids, len(ids), module, config)
        for layer, s in enumerate(outputs):
            grouped = s.view(target.info.n_kv_heads, -1, len(ids)).mean(1)
            torch.testing.assert_close(got[layer, b, :, : len(ids)], grouped.detach(), rtol=1e-9, atol=1e-12)
        assert not got[:, b, :, len(ids) :].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_behind_the_prefill_and_rows_over_its_cache_agree(three_layers, make_module, dtype):
    target = three_layers("qwen3", dtype)
    one = evictor(target, make_module(target, dtype=dtype))
    run = prefilled(target, prompts(target), one)
    assert isinstance(run.watched, LookaheadTokens)
    torch.testing.assert_close(one.scores(run), one.scores(replace(run, watched=None)), rtol=1e-5, atol=1e-8)
    assert one.with_budget(Budget(max(LENGTHS))).hook(LENGTHS) is None  # nobody pays for prompts that fit


def naive_kept(s, kernel, budget):
    """The pooled best of one head, in plain Python."""
    pooled = [max(s[max(0, j - kernel // 2) : j + kernel // 2 + 1]) for j in range(len(s))]
    return sorted(sorted(range(len(s)), key=lambda j: (-pooled[j], j))[:budget])


@pytest.mark.parametrize("kernel", [1, 7])
def test_the_best_rows_stay_uniformly_and_nothing_is_protected(three_layers, make_module, kernel):
    target = three_layers()
    one = evictor(target, make_module(target), replace(CONFIG, pool_kernel=kernel), budget_tokens=9)
    run = prefilled(target, prompts(target), one)
    scores, keep = one.scores(run), one.select(run)
    assert keep.n_LBG.tolist() == [[[9] * 2] * 3] * 3
    for layer in range(3):
        for b, length in enumerate(LENGTHS):
            for head in range(2):
                outputs = naive_kept(scores[layer, b, head, :length].tolist(), kernel, 9)
                assert keep.idx_LBGK[layer, b, head].tolist() == outputs
    last = [length - 1 for length in LENGTHS]
    assert not all(
        last[b] in keep.idx_LBGK[layer, b, h] for layer in range(3) for b in range(3) for h in range(2)
    )


def test_budgets_share_scores_and_a_prompt_that_fits_is_kept_whole(three_layers, make_module):
    target = three_layers()
    one = evictor(target, make_module(target), budget_ratio=0.5)
    run = prefilled(target, prompts(target), one)
    scores = one.scores(run)
    assert torch.equal(one.select(run).idx_LBGK, one.select(run, scores).idx_LBGK)
    assert one.select(run).n_LBG[0, :, 0].tolist() == [15, 6, 25]
    twelve = one.with_budget(Budget(12))
    assert twelve.select(run, scores).n_LBG[:, 1].eq(12).all() and one.budget == Budget(ratio=0.5)
    assert one.with_budget(Budget(50)).select(run) is None
    assert one.with_budget(Budget(ratio=1.0)).select(run) is None


@pytest.mark.parametrize("across", ["heads", "layers"])
def test_adaptive_budgets_keep_the_total_and_give_heads_what_they_want(three_layers, make_module, across):
    target = three_layers()
    module = make_module(target)
    plain, one = (
        evictor(target, module, budget_tokens=10),
        evictor(target, module, budget_tokens=10, adaptive=across),
    )
    run = prefilled(target, prompts(target, [50, 40]), one)
    n = one.select(run).n_LBG
    groups = n.sum(-1) if across == "heads" else n.sum((0, 2))
    heads = 2 if across == "heads" else 6
    assert (groups == 10 * heads).all()
    assert n.min() >= 2 and n.max() > n.min() and not torch.equal(n, plain.select(run).n_LBG)
    flat = one.select(run, torch.ones_like(one.scores(run)))
    assert flat.n_LBG.min() >= 2
    scores = one.scores(run)
    scores[:, :, 0] *= 100  # a head's scale says nothing: scores are shares of its mass
    assert torch.equal(one.select(run, scores).n_LBG, n)


def test_ada_kv_wraps_the_evictor(three_layers, make_module):
    target = three_layers()
    one = evictor(target, make_module(target))
    wrapper = policies.get("adakv", budget=Budget(12), over=one, floor=1.0)
    run = prefilled(target, prompts(target), wrapper)
    assert torch.equal(wrapper.scores(run), one.scores(run)) and wrapper.least_budget == 1
    assert torch.equal(wrapper.select(run).idx_LBGK, one.with_budget(Budget(12)).select(run).idx_LBGK)


def test_engine_with_a_budget_that_fits_is_the_engine_without(three_layers, make_module):
    target = three_layers("qwen3", torch.float32)
    parts = methods.get("lookaheadkv").attach(make_module(target), target, CONFIG, {"budget_tokens": 64})
    texts = [text.tolist() for text in prompts(target)]
    plain = Engine(target).generate(texts, max_new_tokens=8, ignore_eos=True).tokens
    assert Engine(target, parts).generate(texts, max_new_tokens=8, ignore_eos=True).tokens == plain


def test_engine_evicts_in_a_batch_as_alone(three_layers, make_module):
    target = three_layers("qwen3", torch.float32)
    parts = methods.get("lookaheadkv").attach(make_module(target), target, CONFIG, {"budget_tokens": 14})
    texts = [text.tolist() for text in prompts(target)]
    together = Engine(target, parts).generate(texts, max_new_tokens=8, ignore_eos=True).tokens
    alone = [
        Engine(target, parts).generate([text], max_new_tokens=8, ignore_eos=True).tokens[0] for text in texts
    ]
    plain = Engine(target).generate(texts, max_new_tokens=8, ignore_eos=True).tokens
    assert together == alone and together != plain and together[1] == plain[1]
