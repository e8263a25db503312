"""Rows after a cached prompt: any number of them, on any cache, as if they had come one by one."""

import pytest
import torch

from longtrain import methods
from longtrain.decoding.appended import read_after
from longtrain.decoding.engine import Engine
from longtrain.decoding.prefill import pad, prefill
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import ONE_LAYER, attached


@pytest.fixture(scope="module")
def target():
    """In fp64, so that the number of rows of a step decides nothing."""
    return random_target({**ONE_LAYER, "num_hidden_layers": 2}, seed=2, dtype=torch.float64)


def prompts(*lengths):
    gen = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(61, (length,), generator=gen).tolist() for length in lengths]


def new_cache(target, kind):
    """Its maker: plain, or quantised."""
    if kind == "plain":
        return target.new_cache
    return attached("quantspec", target, draft=False).cache


def read(target, kind, texts):
    return prefill(target, new_cache(target, kind), texts, max_new_tokens=500, nodes=1)


@pytest.mark.parametrize("kind", ["plain", "quantised"])
def test_they_are_read_as_if_one_by_one(target, kind):
    """Logits, hidden states, what a watch sees and what the cache holds; lengths and cuts differ by row."""
    texts, after = prompts(300, 120, 250), prompts(140, 3, 20)
    cache, (ids_BT, m_B) = read(target, kind, texts).cache, pad(after, target.device)
    seen = []
    step, forwards = read_after(
        target, cache, ids_BT, m_B.tolist(), hidden=(0, -1), hook=lambda *one: seen.append(one)
    )
    assert forwards == (1 if kind == "plain" else 2)
    assert cache.len_B.tolist() == [440, 123, 270] and [layer for layer, *_ in seen] == [0, 1]
    for row, (text, tokens) in enumerate(zip(texts, after, strict=True)):
        alone, looks = read(target, kind, [text]).cache, []
        states = {0: [], -1: []}
        for token in tokens:
            rows = TokenBatch(alone.len_B[:, None], torch.tensor([[token]]))
            last = target.forward(
                rows,
                alone,
                outputs=OutputRequest("last", (0, -1)),
                hook=lambda *one, looks=looks: looks.append(one),
            )
            alone.commit(None, torch.ones(1, dtype=torch.int64))
            for layer, kept in states.items():
                kept.append(last.hidden[layer][0, 0])
        torch.testing.assert_close(step.logits_BTV[row], last.logits_BTV[0])
        for layer, kept in states.items():
            assert step.hidden[layer].shape[:2] == (3, 140)
            torch.testing.assert_close(step.hidden[layer][row, : len(tokens)], torch.stack(kept))
        for layer in (0, 1):
            for part in (1, 2, 3):  # queries, keys, values
                one = torch.cat([look[part] for look in looks if look[0] == layer], 2)
                torch.testing.assert_close(seen[layer][part][row : row + 1, :, : len(tokens)], one)
        if kind == "quantised":
            assert alone.blocks_B.tolist() == cache.blocks_B[row : row + 1].tolist()


@pytest.mark.parametrize("kind", ["plain", "quantised"])
def test_text_goes_on_from_them(target, kind):
    texts, after = prompts(260), prompts(140)
    parts = Parts(cache=None if kind == "plain" else new_cache(target, kind), name=kind)
    out = Engine(target, parts).generate(texts, max_new_tokens=6, after=after, ignore_eos=True)
    state = read(target, kind, texts)
    tokens = list(after[0])
    while len(tokens) < 146:
        at = int(state.cache.len_B[0]) - 260
        rows = TokenBatch(state.cache.len_B[:, None], torch.tensor([[tokens[at]]]))
        logits = target.forward(rows, state.cache, outputs=OutputRequest("last")).logits_BTV
        state.cache.commit(None, torch.ones(1, dtype=torch.int64))
        if at == len(tokens) - 1:
            tokens.append(int(logits[0, 0].argmax()))
    assert out.tokens[0] == tokens[140:]
    assert out.stats.target_forwards == (1 if kind == "plain" else 2) + 1 + 5


def test_a_draft_that_reads_hidden_states_goes_on_from_them(target):
    """LongSpec's draft on the quantised cache, which takes 128 rows a step."""
    longspec = methods.get("longspec")
    config = longspec.config(window=32)
    module = longspec.build(config, target.info).double()
    parts = Parts(cache=new_cache(target, "quantised"), name="quantised").merge(
        longspec.attach(module, target, config, {})
    )
    call = {"max_new_tokens": 12, "after": prompts(140, 3), "ignore_eos": True}
    engine = Engine(target, parts)
    plain = engine.generate(prompts(300, 120), shape=TreeShape(()), **call)
    assert engine.generate(prompts(300, 120), shape=TreeShape((2, 2)), **call).tokens == plain.tokens
