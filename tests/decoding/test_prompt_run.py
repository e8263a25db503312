"""What policies see of a prefilled batch, against an eager softmax over each prompt alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longtrain.cache.evicted import compact
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget, PromptRun
from longtrain.decoding.observe import AllQueries, Both, LastQueries, observed
from longtrain.decoding.prefill import pad
from longtrain.errors import ConfigError
from longtrain.methods import policies
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.step import OutputRequest, TokenBatch

from .micro import TARGETS, prompts_of, snapkv, target


def ending_at(*ids: int) -> Target:
    """A target whose texts end at these tokens alone."""
    model = random_target("llama_micro", seed=0, dtype=torch.float64)
    model.info = replace(model.info, eos_ids=ids)
    return model


def run_of(model: Target, prompts: list[list[int]], hook=None, extra=0, new=0) -> PromptRun:
    lengths = tuple(map(len, prompts))
    cache = model.new_cache(len(prompts), max(lengths) + new, extra)
    tokens_BS, n_B = pad(prompts, model.device)
    pos_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    step = model.forward(
        TokenBatch(pos_BS, tokens_BS, n_B=n_B), cache, outputs=OutputRequest("last"), hook=hook
    )
    cache.commit(None, n_B)
    return PromptRun(model, cache, lengths, tokens_BS, n_B, step.logits_BTV[:, -1].argmax(-1), hook, new)


def eager(model: Target, text: list[int]) -> tuple[Tensor, Tensor]:
    """Queries [L, H, S, D] and keys [L, G, S, D] of a text, alone."""
    seen = {}
    cache = model.new_cache(1, len(text), 0)
    rows = TokenBatch(torch.arange(len(text))[None], torch.tensor([text]))
    model.forward(
        rows,
        cache,
        outputs=OutputRequest("none"),
        hook=lambda layer, q, k, v: seen.update({layer: (q[0], k[0])}),
    )
    return tuple(torch.stack([seen[layer][i] for layer in sorted(seen)]) for i in (0, 1))


def attention(model: Target, text: list[int]) -> Tensor:
    """p_LHSS of a text by an eager softmax."""
    q, k = eager(model, text)
    k = k.repeat_interleave(model.info.n_heads // model.info.n_kv_heads, 1)
    score = q @ k.transpose(2, 3) * model.info.head_dim**-0.5
    later = torch.ones(len(text), len(text), dtype=torch.bool).triu(1)
    return score.masked_fill(later, -torch.inf).softmax(-1)


@pytest.mark.parametrize("name", TARGETS)
def test_snapkv_keeps_what_an_eager_softmax_says(name):
    model, prompts, budget, W, kernel = target(name), prompts_of(60, 20, 35, 8), 24, 8, 5
    evictor = SnapKV(Budget(budget), window=W, kernel=kernel)
    run = run_of(model, prompts, hook=evictor.hook(tuple(map(len, prompts))))
    scores, keep = evictor.scores(run), evictor.select(run)
    assert torch.equal(keep.idx_LBGK, evictor.select(run, scores).idx_LBGK)
    G, g = model.info.n_kv_heads, model.info.n_heads // model.info.n_kv_heads
    for b, prompt in enumerate(prompts):
        S = len(prompt)
        if budget >= S:
            assert (keep.n_LBG[:, b] == S).all()
            continue
        p = attention(model, prompt)[:, :, S - W :, : S - W].mean(2)
        p = p.view(len(p), G, g, S - W).mean(2)
        torch.testing.assert_close(scores[:, b, :, : S - W], p, atol=1e-12, rtol=1e-9)
        for layer in range(len(p)):
            for head in range(G):
                row = p[layer, head].tolist()
                pooled = [max(row[max(0, i - kernel // 2) : i + kernel // 2 + 1]) for i in range(S - W)]
                best = sorted(range(S - W), key=lambda i: (-pooled[i], i))[: budget - W]
                expected = sorted(best) + list(range(S - W, S))
                assert keep.idx_LBGK[layer, b, head].tolist() == expected


def test_streaming_llm_keeps_sinks_and_the_most_recent():
    run = run_of(target(), prompts_of(30, 10))
    keep = policies.get("streaming_llm", budget=Budget(12), sinks=3).select(run)
    assert keep.idx_LBGK[1, 0, 1].tolist() == [0, 1, 2, *range(21, 30)]
    assert keep.idx_LBGK[0, 1, 0].tolist()[:10] == list(range(10)) and int(keep.n_LBG[0, 1, 0]) == 10


def test_decode_is_plain_decoding_and_leaves_no_trace():
    model, prompts = ending_at(), prompts_of(30, 12, 21)
    expected = Engine(model).generate(prompts, max_new_tokens=20).tokens
    run = run_of(model, prompts, extra=20)
    before = run.cache.k_LBGSD[..., :12, :].clone()
    assert run.decode(20) == expected
    assert run.cache.len_B.tolist() == [30, 12, 21] and torch.equal(before, run.cache.k_LBGSD[..., :12, :])
    assert run.decode(1) == [[t[0]] for t in expected]
    keep = snapkv(16).with_budget(Budget(16)).choose(run, torch.rand(2, 3, model.info.n_kv_heads, 30))
    on_copy = run.decode(20, keep=keep)
    assert on_copy != expected and run.decode(20) == expected
    room = compact(run.cache, keep, run.lengths, room=20)
    rows = []
    root_B = run.root_B
    for _ in range(20):
        rows.append(root_B)
        step = model.forward(
            TokenBatch(room.len_B[:, None], root_B[:, None]), room, outputs=OutputRequest("last")
        )
        room.commit(None, torch.ones(3, dtype=torch.int64))
        root_B = step.logits_BTV[:, -1].argmax(-1)
    assert on_copy == torch.stack(rows, 1).tolist()


def test_decode_ends_where_texts_end():
    prompts = prompts_of(30, 12, 21)
    free = Engine(ending_at()).generate(prompts, max_new_tokens=40).tokens
    ends = (free[0][5], free[1][11], free[2][3])
    model = ending_at(*ends)
    cut = [t[: min(t.index(e) for e in ends if e in t) + 1] for t in free]
    rows = AllQueries((30, 12, 21))
    run = run_of(model, prompts, extra=40)
    assert run.decode(40, hook=rows) == cut and rows.rows == [len(t) for t in cut]
    steps = rows._kept[0]
    assert max(len(t) for t in cut) <= len(steps) < 40  # it stopped early
    assert run.decode(40) == cut


@pytest.mark.parametrize("name", TARGETS)
def test_observers_give_what_an_eager_softmax_says(name):
    """Rows that follow the prompts, with the prompts' last rows or without; one prompt is shorter."""
    model, prompts, after, W = target(name), prompts_of(40, 25, 4), prompts_of(6, 2, 5), 5
    last, rows = LastQueries((40, 25, 4), W), AllQueries((40, 25, 4))
    run = run_of(model, prompts, hook=last, extra=8)
    run.follow(after, rows)
    assert run.cache.len_B.tolist() == [40, 25, 4]
    G, g = model.info.n_kv_heads, model.info.n_heads // model.info.n_kv_heads
    for b, (prompt, then) in enumerate(zip(prompts, after, strict=True)):
        S = len(prompt)
        p = attention(model, prompt + then)
        p = p.view(len(p), G, g, *p.shape[2:])
        cases = [
            (rows, "mean", p[..., S:, :S].mean(3).mean(2)),
            (rows, "max", p[..., S:, :S].amax(3).mean(2)),
        ]
        if S > W:
            cases.append((Both(last, rows), "mean", p[..., S - W :, : S - W].mean(3).mean(2)))
            cases.append((last, "mean", p[..., S - W : S, : S - W].mean(3).mean(2)))
        for who, reduce, expected in cases:
            found = observed(run, who, reduce=reduce)[:, b]
            torch.testing.assert_close(found[..., : expected.shape[-1]], expected, atol=1e-12, rtol=1e-9)
            assert not found[..., expected.shape[-1] :].any()


def test_decoded_rows_observe_as_rows_that_follow():
    model, prompts = target(), prompts_of(30, 12)
    decoded, followed = AllQueries((30, 12)), AllQueries((30, 12))
    run = run_of(model, prompts, extra=9)
    run.follow(run.decode(9, hook=decoded), followed)
    torch.testing.assert_close(observed(run, decoded), observed(run, followed), atol=1e-12, rtol=1e-9)


def test_follow_wants_rows_for_every_prompt():
    run = run_of(target(), prompts_of(10, 12), extra=4)
    for rows in ([[1]], [[], []]):
        with pytest.raises(ConfigError, match="to follow 2 prompts; allowed: one list a prompt"):
            run.follow(rows, AllQueries(run.lengths))
    with pytest.raises(ConfigError, match="cache is full"):
        run.follow([[1] * 5, [1]], AllQueries(run.lengths))


def test_observed_rows_hold_no_more_than_themselves():
    """A view would keep every query of the prompt."""
    hook = LastQueries((500,), 4)
    run_of(target(), prompts_of(500), hook=hook)
    for tensor in hook.layer(0):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
