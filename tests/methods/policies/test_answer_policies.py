"""Policies that look at an answer: the target's own (oracle), an evicted copy's (LAQ), a draft's (SpecKV)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget, PromptRun
from longtrain.decoding.roles import Parts
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods import policies
from longtrain.methods.policies import laq, speckv
from longtrain.targets.loading import load_target

from .naive import Eager, Evicted, group_mean, micro, pooled, top_with_window
from .runs import kept, prefilled, prompts_of

SHAPES = ["llama_micro", "qwen3_micro"]
MIXED = (90, 37, 20, 64)
TOKENS, WINDOW, M = 28, 8, 6


def rows_on_prompt(A_LHTT, first, n_prompt):
    """Mean over the rows from `first` on of their attention on the prompt, mean over each KV head's heads."""
    return group_mean(A_LHTT[:, :, first:, :n_prompt].mean(2), 2)


def answers_of(monkeypatch, name):
    """What a run's `decode` or `follow` gave or was given, recorded."""
    seen, real = [], getattr(PromptRun, name)

    def spy(self, *args, **options):
        out = real(self, *args, **options)
        seen.append(out if name == "decode" else args[0])
        return out

    monkeypatch.setattr(PromptRun, name, spy)
    return seen


@pytest.mark.corners
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [1, 7])
def test_oracle_is_the_answers_own_attention(shape, kernel):
    target = micro(shape)
    eager = Eager(target)
    policy = policies.get("oracle", budget=Budget(TOKENS), kernel=kernel)
    prompts = prompts_of(*MIXED)
    run = prefilled(target, prompts, policy, max_new_tokens=M)
    s_LBGS, keep = policy.scores(run), policy.select(run)
    for seq, prompt in enumerate(prompts):
        n = len(prompt)
        A_LHTT = eager.attention([*prompt, *eager.answer(prompt, M)])
        expected = rows_on_prompt(A_LHTT, n, n)
        torch.testing.assert_close(s_LBGS[:, seq, :, :n], expected, atol=1e-10, rtol=1e-10)
        assert not s_LBGS[:, seq, :, n:].any()
        rows = TOKENS if n > TOKENS else n
        assert kept(keep, seq) == top_with_window(expected, n, lambda _, rows=rows: rows, 0, kernel)


def test_oracle_looks_at_no_more_than_its_tokens():
    target, prompts = micro(eos_token_id=None), prompts_of(50)
    few = policies.get("oracle", budget=Budget(20), n_tokens=2)
    run = prefilled(target, prompts, few, max_new_tokens=9)
    A_LHTT = Eager(target).attention([*prompts[0], *Eager(target).answer(prompts[0], 2)])
    torch.testing.assert_close(few.scores(run)[:, 0], rows_on_prompt(A_LHTT, 50, 50), atol=1e-10, rtol=1e-10)


def laq_reference(target, prompt, *, second, softmax):
    """Kept rows and pseudo answer of LAQ, step by step with whole matrices."""
    eager, n = Eager(target), len(prompt)
    A_LHTT = eager.attention(prompt)
    snap = group_mean(A_LHTT[:, :, -WINDOW:, :-WINDOW].mean(2), 2)
    first = top_with_window(snap, n, lambda _: TOKENS - WINDOW, WINDOW, kernel=7)
    evicted = Evicted(target, first, n)
    tokens = evicted.answer(prompt, M)
    A_LHTT = evicted.looks([*prompt, *tokens])
    rows = A_LHTT[:, :, n - second :, :n]
    if softmax == "shifted":  # row i stands where the prompt's N - i last row stands
        count = rows.shape[2]
        rows = rows.masked_fill(torch.ones(count, n).triu(n - count + 1).bool(), 0)
    if softmax != "answer":  # a softmax over fewer keys: the same weights, made to sum to 1 again
        rows = rows / rows.sum(-1, keepdim=True)
    scores = group_mean(rows.mean(2), 2)
    return top_with_window(scores, n, lambda _: TOKENS - second, second, kernel=7), tokens


@pytest.mark.corners
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("second", [0, 3, WINDOW])
@pytest.mark.parametrize("softmax", ["answer", "prompt", "shifted"])
def test_laq_scores_with_queries_of_the_evicted_copy(shape, second, softmax, monkeypatch):
    target = micro(shape)
    options = {"n_tokens": M, "second_window": second, "softmax": softmax}
    policy = policies.get("laq", budget=Budget(TOKENS), window=WINDOW, **options)
    prompts = prompts_of(*MIXED)
    decoded = answers_of(monkeypatch, "decode")
    keep = policy.select(prefilled(target, prompts, policy))
    for seq, prompt in enumerate(prompts):
        if len(prompt) <= TOKENS:
            assert kept(keep, seq) == [[list(range(len(prompt)))] * 2] * 2
            continue
        expected, tokens = laq_reference(target, prompt, second=second, softmax=softmax)
        assert decoded[0][seq] == tokens
        assert kept(keep, seq) == expected


def test_laq_on_the_prompt_alone_scores_with_the_targets_own_scale(monkeypatch):
    """Gemma does not scale by head_dim ** -0.5; beside the plain formula with the queries that LAQ saw."""
    target = micro("gemma3_micro", query_pre_attn_scalar=1024)
    seen, real = [], laq._on_prompt

    def spy(run, last, rows, *, shifted):
        out = real(run, last, rows, shifted=shifted)
        for at, layer in enumerate(run.layers):
            q_NHD = torch.cat((last.pieces(layer)[0][0], rows.pieces(layer)[0][0]))
            k_TGD = run.cache.prefix(layer)[0][0, : run.lengths[0]]
            seen.append((out[at, 0], q_NHD, k_TGD, target.scaling(layer)))
        return out

    monkeypatch.setattr(laq, "_on_prompt", spy)
    policy = policies.get("laq", budget=Budget(TOKENS), window=WINDOW, n_tokens=M, softmax="prompt")
    policy.select(prefilled(target, prompts_of(50), policy))
    for got_GS, q_NHD, k_TGD, scale in seen:
        assert scale != q_NHD.shape[-1] ** -0.5
        q_NGgD = q_NHD.unflatten(1, (k_TGD.shape[1], -1))
        p_NGgT = torch.einsum("nghd,tgd->nght", q_NGgD, k_TGD).mul(scale).softmax(-1)
        torch.testing.assert_close(got_GS, p_NGgT.mean((0, 2)), atol=1e-12, rtol=1e-12)
    assert seen


def test_laqs_softmaxes_keep_different_rows():
    target, prompts = micro(), prompts_of(90, 80)
    found = []
    for softmax in ("answer", "prompt", "shifted"):
        policy = policies.get("laq", budget=Budget(9), window=WINDOW, n_tokens=12, softmax=softmax)
        found.append(policy.scores(prefilled(target, prompts, policy)))
    totals = [scores[:, 0].sum(-1) for scores in found]
    assert (totals[0] < 0.99).all()  # the pseudo rows' own keys have their share
    torch.testing.assert_close(totals[1:], [torch.ones_like(totals[0])] * 2)
    assert found[2][:, 0, :, 89].max() < found[1][:, 0, :, 89].max()


def test_laq_decodes_another_answer_than_the_whole_cache(monkeypatch):
    target, prompts = micro(eos_token_id=None), prompts_of(90, 80, 70)
    policy = policies.get("laq", budget=Budget(9), window=WINDOW, n_tokens=12)
    run = prefilled(target, prompts, policy)
    decoded = answers_of(monkeypatch, "decode")
    policy.select(run)
    whole = run.decode(12)
    assert whole == [Eager(target).answer(prompt, 12) for prompt in prompts]
    assert [row[0] for row in decoded[0]] == [row[0] for row in whole]  # the prefill's own first token
    assert all(cut != full for cut, full in zip(decoded[0], whole, strict=True))


def test_laq_says_that_its_scores_depend_on_the_budget():
    target, prompts = micro(), prompts_of(90)
    policy = policies.get("laq", budget=Budget(9), window=WINDOW, n_tokens=M)
    run = prefilled(target, prompts, policy)
    assert policy.scores_depend_on_budget
    assert not torch.equal(policy.scores(run), policy.with_budget(Budget(60)).scores(run))


@pytest.mark.corners
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_speckv_reads_the_drafts_answer(shape, reduction):
    target, draft = micro(shape), micro("llama_micro", seed=7, num_hidden_layers=1)
    policy = policies.get(
        "speckv", budget=Budget(TOKENS), window=WINDOW, draft=draft, n_tokens=M, reduction=reduction
    )
    prompts = prompts_of(*MIXED)
    keep = policy.select(prefilled(target, prompts, policy))
    for seq, prompt in enumerate(prompts):
        n = len(prompt)
        if n <= TOKENS:
            assert kept(keep, seq) == [[list(range(n))] * 2] * 2
            continue
        A_LHTT = Eager(target).attention([*prompt, *Eager(draft).answer(prompt, M)])
        first = n - WINDOW - 1
        seen = A_LHTT[:, :, first:, :first].unflatten(1, (2, -1)).flatten(2, 3)
        s_LGS = seen.amax(2) if reduction == "max" else seen.mean(2)
        s_LGS = torch.nn.functional.pad(s_LGS, (0, 1))  # the first observer's own key has no score
        expected = top_with_window(s_LGS, n, lambda _: TOKENS - WINDOW, WINDOW, kernel=7)
        assert kept(keep, seq) == expected


def test_speckv_refuses_a_draft_with_another_tokenizer(monkeypatch):
    target = micro()
    other = load_target("tiny")
    policy = policies.get("speckv", budget=Budget(40), draft=other)
    with pytest.raises(TargetMismatchError, match="tokenizer"):
        policy.select(prefilled(target, prompts_of(60), policy))
    larger = micro(vocab_size=120)
    policy = policies.get("speckv", budget=Budget(40), draft=larger)
    with pytest.raises(TargetMismatchError, match="97"):
        policy.select(prefilled(target, prompts_of(60), policy))


def test_speckv_reads_its_draft_once(monkeypatch):
    target, draft = micro(), micro(seed=3)
    reads = []

    def load(where, **options):
        reads.append((where, options))
        return draft

    speckv._loaded.cache_clear()
    monkeypatch.setattr(speckv, "load_target", load)
    policy = policies.get("speckv", budget=Budget(40), draft="some/draft")
    run = prefilled(target, prompts_of(60), policy)
    for tokens in (36, 40, 44):
        policy.with_budget(Budget(tokens)).select(run)
    assert reads == [("some/draft", {"dtype": torch.float64, "device": target.device})]
    speckv._loaded.cache_clear()


def test_an_answer_that_ends_at_once_is_one_row():
    target, prompts = micro(), prompts_of(40, 50)
    for name, options in (("oracle", {}), ("laq", {"window": 8})):
        policy = policies.get(name, budget=Budget(20), **options)
        run = prefilled(target, prompts, policy)
        stop = int(run.root_B[0])
        run.target.info = replace(target.info, eos_ids=(stop,))
        s_LBGS = policy.scores(run)
        if name == "oracle":
            A_LHTT = Eager(target).attention([*prompts[0], stop])
            expected = rows_on_prompt(A_LHTT, 40, 40)
            torch.testing.assert_close(s_LBGS[:, 0, :, :40], expected, atol=1e-10, rtol=1e-10)
        assert torch.isfinite(s_LBGS).all()
        assert (s_LBGS[:, 0].sum(-1) > 0).all()


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("laq", {"n_tokens": 0}, "n_tokens"),
        ("laq", {"window": 0}, "window"),
        ("oracle", {"n_tokens": 0}, "n_tokens"),
        ("speckv", {}, "evict.draft"),
        ("speckv", {"draft": "x", "reduction": "median"}, "reduction"),
        ("laq", {"second_window": 33}, "second_window"),
        ("laq", {"softmax": "rows"}, "softmax"),
        ("speckv", {"draft": "x", "window": 0}, "window"),
        ("speckv", {"draft": "x", "drafts": "y"}, "drafts"),
    ],
)
def test_bad_options_are_refused(name, options, word):
    with pytest.raises(ConfigError, match=word):
        policies.get(name, budget=Budget(64), **options)


def test_a_budget_below_the_window_is_refused():
    target = micro()
    for name, options in (("laq", {}), ("laq", {"second_window": 8}), ("speckv", {"draft": micro(seed=2)})):
        policy = policies.get(name, budget=Budget(7), window=8, **options)
        with pytest.raises(ConfigError, match="budget"):
            policy.select(prefilled(target, prompts_of(40), policy))


def test_pooling_moves_the_oracle_but_not_its_scores():
    target, prompts = micro(), prompts_of(60)
    plain, wide = (policies.get("oracle", budget=Budget(12), kernel=kernel) for kernel in (1, 7))
    run = prefilled(target, prompts, plain)
    scores = plain.scores(run)
    assert torch.equal(scores, wide.scores(run))
    assert kept(plain.select(run, scores), 0) != kept(wide.select(run, scores), 0)
    row = scores[0, 0, 0].tolist()
    assert pooled(row, 1) == row


def test_a_sampled_oracle_does_not_depend_on_the_place_in_the_batch():
    target, prompts, ids = micro("llama_micro"), prompts_of(60, 45, 60), (4, 9, 2)
    seen = []

    class Spy(policies.policy_class("oracle")):
        def select(self, run, scores=None):
            keep = super().select(run, scores)
            seen.append([kept(keep, seq) for seq in range(len(run.lengths))])
            return keep

    def keeps(order):
        spy = Spy(Budget(20), temperature=1.5, seed=3)
        Engine(target, Parts(evictor=spy)).generate(
            [prompts[i] for i in order], max_new_tokens=M, sequence_ids=[ids[i] for i in order]
        )
        return dict(zip(order, seen[-1], strict=True))

    together = keeps([0, 1, 2])
    assert keeps([2, 0, 1]) == together
    assert {i: keeps([i])[i] for i in range(3)} == together


def test_oracle_of_a_sampled_answer_scores_that_answer():
    target = micro("llama_micro")
    eager, prompts = Eager(target), prompts_of(*MIXED)
    policy = policies.get("oracle", budget=Budget(TOKENS), temperature=1.5, seed=3)
    run = prefilled(target, prompts, policy, max_new_tokens=M)
    answers = run.decode(M, sampling=Sampling(temperature=1.5, seed=3))
    engine = Engine(target).generate(prompts, max_new_tokens=M, sampling=Sampling(1.5, seed=3))
    assert answers == engine.tokens != run.decode(M)
    s_LBGS = policy.scores(run)
    for seq, prompt in enumerate(prompts):
        n = len(prompt)
        expected = rows_on_prompt(eager.attention([*prompt, *answers[seq]]), n, n)
        torch.testing.assert_close(s_LBGS[:, seq, :, :n], expected, atol=1e-10, rtol=1e-10)
    run.sequence_ids = (7, 1, 5, 2)[: len(prompts)]
    settings = {"max_new_tokens": M, "sampling": Sampling(1.5, seed=3), "sequence_ids": run.sequence_ids}
    assert (
        run.decode(M, sampling=Sampling(1.5, seed=3)) == Engine(target).generate(prompts, **settings).tokens
    )
