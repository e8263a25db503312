"""Policies that watch the prefill, against attention matrices written out in full."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.evict import Budget
from longtrain.errors import ConfigError
from longtrain.methods import policies
from longtrain.methods.policies.pyramidkv import pyramid

from .naive import Eager, best, group_mean, micro, top_with_window
from .runs import kept, prefilled, prompts_of

SHAPES = ["llama_micro", "qwen3_micro"]
MIXED = (90, 37, 20, 64)
"""Prompt lengths; one is within the budget below."""


def window_scores(A_LHTT, n_kv_heads, window):
    """Mean attention of the last rows on the keys before them."""
    T = A_LHTT.shape[-1]
    return group_mean(A_LHTT[:, :, T - window :, : T - window].mean(2), n_kv_heads)


@pytest.mark.corners
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "h2o", "tova"])
@pytest.mark.parametrize("seed", [0, 1])
def test_keeps_what_full_matrices_say(shape, name, seed):
    target = micro(shape, seed=seed)
    eager, G, L = Eager(target), target.info.n_kv_heads, target.info.n_layers
    tokens, window = 28, 1 if name == "tova" else 8
    options = {"pyramidkv": {"beta": 5}, "h2o": {"chunk": 16}}.get(name, {})
    policy = policies.get(name, budget=Budget(tokens), window=window, **options)
    prompts = prompts_of(*MIXED, seed=seed)
    keep = policy.select(prefilled(target, prompts, policy))

    for seq, prompt in enumerate(prompts):
        n = len(prompt)
        if n <= tokens:
            assert kept(keep, seq) == [[list(range(n))] * G] * L
            continue
        A_LHTT = eager.attention(prompt)
        if name == "h2o":
            expected = top_with_window(
                group_mean(A_LHTT.sum(2), G), n, lambda _: tokens - window, window, kernel=1
            )
        elif name == "tova":
            last_LS = A_LHTT[:, :, -1, :-1].mean(1).tolist()
            expected = [[[*best(row, tokens - 1), n - 1]] * G for row in last_LS]
        else:
            rows = [tokens - window] * L
            if name == "pyramidkv":
                # b = 20: least 20 // 5 = 4, most 36; two layers, so one step of most - least.
                # At 37 tokens: shorter than 2 b = 40, no pyramid.
                rows = {90: [36, 4], 64: [36, 4], 37: [20, 20]}[n]
            expected = top_with_window(
                window_scores(A_LHTT, G, window), n, lambda layer, rows=rows: rows[layer], window, kernel=7
            )
        assert kept(keep, seq) == expected


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_h2o_sums_columns_in_any_chunks(chunk):
    target = micro("qwen3_micro")
    policy = policies.get("h2o", budget=Budget(16), window=4, chunk=chunk)
    prompts = prompts_of(41, 64, 5)
    s_LBGS = policy.scores(prefilled(target, prompts, policy))
    for seq, prompt in enumerate(prompts):
        expected = group_mean(Eager(target).attention(prompt).sum(2), 2)
        torch.testing.assert_close(s_LBGS[:, seq, :, : len(prompt)], expected, atol=1e-10, rtol=1e-10)
        assert not s_LBGS[:, seq, :, len(prompt) :].any()


def test_scores_can_be_shared_by_budgets():
    target = micro()
    policy = policies.get("pyramidkv", budget=Budget(20), window=8)
    run = prefilled(target, prompts_of(70), policy)
    scores = policy.scores(run)
    for tokens in (12, 20, 40):
        other = policy.with_budget(Budget(tokens))
        assert kept(other.select(run, scores), 0) == kept(other.select(run), 0)


@pytest.mark.parametrize(
    ("layers", "budget", "length", "expected"),
    [
        # b = 64, beta 20: least 3, most 125, step 122 // 3 = 40.
        (4, 72, 1000, [133, 93, 53, 13]),
        # C = 128, W = 32, 32 layers: b = 96, least 4, most 188, step 184 // 31 = 5.
        (32, 128, 8000, [220 - 5 * layer for layer in range(32)]),
        # 130 tokens leave 122 before the window, less than 125: most 122, least 6, step 116 // 3 = 38.
        (4, 72, 130, [130, 92, 54, 16]),
        # 133 tokens: most = 125 = what there is, the same as without the cap.
        (4, 72, 133, [133, 93, 53, 13]),
        # From 2 b on a pyramid, below it none.
        (4, 72, 128, [128, 91, 54, 17]),
        (4, 72, 127, [72] * 4),
        (4, 72, 73, [72] * 4),
        # Within the budget.
        (4, 72, 72, [72] * 4),
        (4, 72, 50, [50] * 4),
        # Nothing but the window; one layer.
        (4, 8, 500, [8] * 4),
        (1, 72, 500, [72]),
    ],
)
def test_pyramid_of_layers(layers, budget, length, expected):
    assert pyramid(layers, budget, length, window=32 if layers == 32 else 8, beta=20) == expected


def test_pyramid_spends_about_the_budget():
    for budget in (64, 128, 512):
        rows = pyramid(32, budget, 100_000, window=32, beta=20)
        assert rows == sorted(rows, reverse=True)
        # One integer step short at most in every layer but the first.
        assert 0 <= sum(rows) - 32 * budget <= 32 * 31 / 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pyramidkv", {"beta": 0}),
        ("h2o", {"chunk": 0}),
        ("tova", {"window": 2}),
        ("pyramidkv", {"kernel": 4}),
        ("h2o", {"betas": 3}),
    ],
)
def test_bad_options_are_refused(name, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        policies.get(name, budget=Budget(64), **options)
