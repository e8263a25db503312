"""Eviction goes on while a text grows: the rows that rules say stay, with and without speculation."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.methods import get
from longtrain.methods.kvzap.runtime import KVzapEvictor
from tests.methods.kvzap.held_back import decoded, positions
from tests.methods.policies.runs import prompts_of


def expected(s_LGN, n_prompt, *, budget, window, stride, sinks, threshold):
    """Positions held after every position was written, by sorting: budgets across all layers and heads."""
    L, G, N = s_LGN.shape
    cells = [(layer, head) for layer in range(L) for head in range(G)]

    def judged(held, rows):
        """The best of what is held, `rows` a head on average."""
        ranked = sorted(
            (0 if at < sinks else 1, -float(s_LGN[la, h, at]), la, h, at)
            for la, h in cells
            for at in held[la, h]
        )
        best = {cell: [] for cell in cells}
        for free, minus, la, h, at in ranked[: rows * len(cells)]:
            if not free or threshold is None or -minus >= threshold:
                best[la, h].append(at)
        return {cell: sorted(rows) for cell, rows in best.items()}

    start = n_prompt - min(window, n_prompt - 1)  # where the tail begins
    held = judged({cell: list(range(start)) for cell in cells}, budget - window if n_prompt > budget else N)
    for n in range(n_prompt + 1, N + 1):
        if n - start >= window + stride:
            joined = {cell: [*rows, *range(start, n - window)] for cell, rows in held.items()}
            start = n - window
            held = judged(joined, budget - window)
    return [[[*held[la, h], *range(start, N)] for h in range(G)] for la in range(L)]


@pytest.mark.parametrize(
    ("budget", "threshold"), [(12, None), (1000, 0.1), (30, None)], ids=["budget", "threshold", "later"]
)
def test_rows_held_are_the_best_of_those_that_left_the_window(target, module, config, budget, threshold):
    stride, prompts = 4, prompts_of(40, 25, 2, vocab=4000)
    answers = prompts_of(23, 23, 23, seed=1, vocab=4000)
    evictor = KVzapEvictor(
        module, config, Budget(budget), threshold=threshold, decoding=True, stride=stride, window=3
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        cache, k_LBGND, s_LBGN = decoded(target, evictor, [prompt], [answer])
        found = positions(cache, k_LBGND, 0)
        assert found == expected(
            s_LBGN[:, 0], len(prompt), budget=budget, window=3, stride=stride, sinks=2, threshold=threshold
        )
        assert int(cache.len_B) == len(prompt) + 23


@pytest.mark.parametrize("budget", [12, 100])
def test_speculation_repeats_the_text_and_a_batch_that_of_each_alone(
    target, module, config, budget, monkeypatch
):
    score = module.score  # rows of a token are equal in the first layer: rounding must not choose among them
    monkeypatch.setattr(module, "score", lambda layer, x_BTE: score(layer, x_BTE).float().double())
    prompts = [[*prompt, *prompt[:12]] for prompt in prompts_of(30, 17, 40, vocab=50)]
    evictor = KVzapEvictor(module, config, Budget(budget), decoding=True, stride=4, threshold=0.0)
    plain = Engine(target, Parts(evictor=evictor, name="kvzap"))
    spec = get("prompt_lookup")
    draft = spec.attach(spec.build(spec.config(ngram=1), target.info), target, spec.config(ngram=1), {})
    both = Engine(target, Parts(evictor=evictor, name="kvzap").merge(draft))
    after = prompts_of(9, 2, 5, seed=4, vocab=50)
    wanted = [
        plain.generate([prompt], after=[then], max_new_tokens=30, ignore_eos=True).tokens[0]
        for prompt, then in zip(prompts, after, strict=True)
    ]
    found = plain.generate(prompts, after=after, max_new_tokens=30, ignore_eos=True)
    assert found.tokens == wanted
    drafted = both.generate(prompts, after=after, max_new_tokens=30, ignore_eos=True)
    assert drafted.tokens == wanted
    full = Engine(target).generate(prompts, after=after, max_new_tokens=30, ignore_eos=True)
    assert found.tokens != full.tokens


def test_with_room_for_all_the_text_is_that_of_the_full_cache(target, module, config):
    evictor = KVzapEvictor(module, config, Budget(ratio=1.0), decoding=True, stride=4)
    prompts = prompts_of(30, 17, vocab=4000)
    found, full = (
        engine.generate(prompts, max_new_tokens=30, ignore_eos=True)
        for engine in (Engine(target, Parts(evictor=evictor, name="kvzap")), Engine(target))
    )
    assert found.tokens == full.tokens and found.stats.target_forwards == full.stats.target_forwards


def test_the_cache_stays_small(target, module, config):
    evictor = KVzapEvictor(module, config, Budget(12), decoding=True, stride=4)
    cache, _, _ = decoded(target, evictor, prompts_of(40, vocab=4000), prompts_of(60, seed=1, vocab=4000))
    assert cache._held_LBG.double().mean() + int(cache.tail.len_B[0]) <= 12 + 4
    assert cache.tail.capacity <= 6 + 2 * 4 + 61
    assert torch.isfinite(cache.prefixes[0].k_ND).all()
