"""Every policy inside the engine, and its scores on a GPU."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.methods import policies
from longtrain.targets.tokenizer import read_tokenizer

from .naive import micro
from .runs import kept, prefilled, prompts_of

OPTIONS = {
    "pyramidkv": {"window": 8},
    "h2o": {"window": 8, "chunk": 16},
    "tova": {},
    "adakv": {"options": {"window": 8}},
    "laq": {"window": 8, "n_tokens": 5},
    "speckv": {"window": 8, "n_tokens": 5},
    "kvzip": {"chunk": 16},
    "random": {"window": 8},
    "oracle": {},
}
EXACT = ("h2o", "tova", "laq", "speckv", "kvzip", "random", "oracle")
"""Policies whose rows come out at the budget to the row; the others round."""


@pytest.fixture(scope="module")
def target():
    """Random weights behind the bundled tokenizer; no id ends an answer."""
    tokenizer = read_tokenizer("tiny")[0]
    found = micro("qwen3_micro", vocab_size=len(tokenizer), eos_token_id=None)
    found.tokenizer = tokenizer
    return found


def policy_of(name, draft=None, **budget):
    extra = {"draft": draft} if name == "speckv" else {}
    return policies.get(name, budget=Budget(**budget), **OPTIONS[name], **extra)


@pytest.fixture(scope="module")
def draft(target):
    found = micro(vocab_size=target.info.vocab_size, seed=4, eos_token_id=None)
    found.tokenizer = target.tokenizer
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_decodes_as_each_prompt_alone(target, draft, name):
    prompts = prompts_of(60, 20, 41)
    engine = Engine(target, Parts(evictor=policy_of(name, draft, tokens=24), name=name))
    together = engine.generate(prompts, max_new_tokens=8)
    alone = [engine.generate([prompt], max_new_tokens=8).tokens[0] for prompt in prompts]
    assert together.tokens == alone
    kept = together.stats.kept_entries
    assert kept[1] == 20
    for rows in (kept[0], kept[2]):
        assert abs(rows - 24) <= (0 if name in EXACT else 0.5)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_keeps_what_each_prompt_keeps_alone_and_leaves_the_cache_as_it_was(target, draft, name):
    policy, lengths = policy_of(name, draft, ratio=0.5), (30, 61, 44)
    prompts = prompts_of(*lengths)
    run = prefilled(target, prompts, policy)
    before = [[x[seq, :n].clone() for x in run.cache.prefix(1)] for seq, n in enumerate(lengths)]
    scores, together = policy.scores(run), policy.select(run)
    assert run.cache.len_B.tolist() == list(lengths)
    for seq, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        for was, now in zip(before[seq], run.cache.prefix(1), strict=True):
            assert torch.equal(was, now[seq, :n])
        assert kept(together, seq) == kept(policy.select(prefilled(target, [prompt], policy)), 0)
    if scores is not None:
        assert torch.equal(scores, policy.scores(run))


@pytest.mark.parametrize("name", OPTIONS)
def test_only_prompts_above_the_budget_are_cut_and_no_budget_is_below_what_stays(target, draft, name):
    policy = policy_of(name, draft, tokens=64)
    run = prefilled(target, prompts_of(64, 40), policy)
    assert policy.select(run) is None
    assert policy.with_budget(Budget(63)).select(run) is not None
    least = policy.least_budget
    if least > 1:
        with pytest.raises(ConfigError, match="budget"):
            policy.with_budget(Budget(least - 1)).select(run)
    keep = policy.with_budget(Budget(least)).select(run)
    assert {len(row) for heads in kept(keep, 0) for row in heads} == {least}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_budget_that_holds_the_prompts_changes_nothing(target, draft, name):
    prompts = prompts_of(30, 17)
    plain = Engine(target).generate(prompts, max_new_tokens=8)
    engine = Engine(target, Parts(evictor=policy_of(name, draft, tokens=30), name=name))
    assert engine.generate(prompts, max_new_tokens=8).tokens == plain.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "adakv"])
def test_scores_on_a_gpu_are_those_in_fp64(name):
    tokenizer, scores = read_tokenizer("tiny")[0], []
    for dtype, device in ((torch.float64, "cpu"), (torch.float32, "cuda")):
        # Without end ids both decode the same tokens unless two logits tie within fp32.
        pair = [
            micro(shape, vocab_size=len(tokenizer), seed=seed, eos_token_id=None).to(device, dtype)
            for shape, seed in (("qwen3_micro", 0), ("llama_micro", 4))
        ]
        for one in pair:
            one.tokenizer = tokenizer
        policy = policy_of(name, pair[1], tokens=24)
        run = prefilled(pair[0], prompts_of(300, 41, 129), policy)
        found = policy.scores(run)
        if found is None:
            pytest.skip("a policy without scores")
        scores.append(found.cpu().double())
    torch.testing.assert_close(scores[1], scores[0], atol=2e-4, rtol=2e-3)  # tf32-free fp32 attention
