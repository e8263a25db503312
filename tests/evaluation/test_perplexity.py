from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError, ConflictError
from longtrain.evaluation.perplexity import (
    TextWindow,
    measure,
    perplexity,
    spans,
)
from longtrain.methods import policies
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from tests.helpers import HEADS_OF_64, attached

TEXT = np.random.default_rng(0).integers(0, 97, 130).tolist()


@pytest.fixture(scope="module")
def target():
    return random_target("llama_micro", seed=0, dtype=torch.float64)


def pieces(window, stride):
    found = list(spans(len(TEXT), window=window, stride=stride))
    return [TEXT[s.begin : s.first] for s in found], [TEXT[s.first : s.end] for s in found]


def evictor(name, tokens):
    options = {} if name == "streaming_llm" else {"window": 8}
    return Parts(evictor=policies.get(name, budget=Budget(tokens), **options), name=name)


def test_windows_move_on_by_the_stride_and_score_each_token_once():
    assert list(spans(10, window=6, stride=2)) == [
        TextWindow(0, 1, 6),
        TextWindow(2, 6, 8),
        TextWindow(4, 8, 10),
    ]
    assert list(spans(9, window=6, stride=2))[-1] == TextWindow(4, 8, 9)
    assert list(spans(4, window=6, stride=2)) == [TextWindow(0, 1, 4)]
    assert list(spans(1, window=6, stride=2)) == []
    for n in range(2, 40):
        scored = [at for span in spans(n, window=7, stride=3) for at in range(span.first, span.end)]
        assert scored == list(range(1, n))


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_the_full_cache_gives_what_one_forward_of_each_window_gives(target, rows):
    """The reference is the sliding window as commonly written: labels of the context are left out."""
    contexts, scored = pieces(48, 16)
    found = measure(target, Parts(), contexts, scored=scored, rows=rows)
    for one, context, tokens in zip(found, contexts, scored, strict=True):
        ids = torch.tensor([*context, *tokens])
        hidden = target.packed(ids, torch.arange(len(ids)), (0, len(ids))).hidden[-1]
        logits = target.head(hidden)[len(context) - 1 : -1]
        wanted = cross_entropy(logits, ids[len(context) :], reduction="sum")
        assert one.nats == pytest.approx(float(wanted), rel=1e-12)
        assert (one.tokens, one.kept_entries) == (len(tokens), len(context))
    assert sum(one.tokens for one in found) == len(TEXT) - 1


@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv", "pyramidkv"])
def test_an_evicted_context_is_scored_like_tokens_that_come_one_by_one(target, policy):
    contexts, scored = pieces(64, 16)
    parts = evictor(policy, 20)
    found = measure(target, parts, contexts, scored=scored)
    slow = [measure(target, parts, [a], scored=[b], rows=1)[0] for a, b in zip(contexts, scored, strict=True)]
    full = measure(target, Parts(), contexts, scored=scored)
    assert [one.nats for one in found] == pytest.approx([one.nats for one in slow], rel=1e-12)
    assert [one.kept_entries for one in found] == [one.kept_entries for one in slow]
    assert found[0] == full[0]  # the first window's context is one token: nothing to evict
    for one, whole in zip(found[1:], full[1:], strict=True):
        assert one.kept_entries == 20 and whole.kept_entries == 48 and abs(one.nats - whole.nats) > 1e-6


def later_nats(target, parts, context, tokens):
    """Without the first token: the context's last row foretold it before anything was evicted."""
    both = measure(target, parts, [context, context], scored=[tokens, tokens[:1]])
    return both[0].nats - both[1].nats


def test_only_kept_rows_are_seen(target):
    """One layer, for in deeper ones the kept rows have seen the others: what lay between may be anything."""
    context, tokens = TEXT[:60], TEXT[60:80]
    changed = [*context[:10], *reversed(context[10:40]), *context[40:]]
    shallow = random_target({**SHAPES["llama_micro"], "num_hidden_layers": 1}, dtype=torch.float64)
    for parts, same in ((evictor("streaming_llm", 16), True), (Parts(), False)):
        a, b = (later_nats(shallow, parts, ids, tokens) for ids in (context, changed))
        assert (a == pytest.approx(b, rel=1e-10)) is same


def test_a_budget_above_the_context_changes_nothing(target):
    contexts, scored = pieces(48, 16)
    whole = measure(target, Parts(), contexts, scored=scored)
    assert measure(target, evictor("snapkv", 64), contexts, scored=scored) == whole


def test_a_cache_of_the_parts_own_is_used(target):
    made = []

    def new_cache(*sizes):
        made.append(target.new_cache(*sizes))
        return made[-1]

    contexts, scored = pieces(48, 16)
    found = measure(target, Parts(cache=new_cache), contexts, scored=scored)
    assert len(made) == 1 and found == measure(target, Parts(), contexts, scored=scored)
    both = Parts(evictor=evictor("snapkv", 64).evictor, cache=new_cache, name="both")
    with pytest.raises(ConflictError, match="leave one out"):
        measure(target, both, contexts, scored=scored)


@pytest.fixture(scope="module")
def wide():
    """Heads of the size that a quantised cache needs."""
    return random_target(HEADS_OF_64, seed=0, dtype=torch.float64)


@pytest.mark.parametrize("strict", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_quantised_cache_is_scored_whatever_the_step(wide, strict):
    parts = attached("quantspec", wide, draft=False, strict_flush=strict)
    text = np.random.default_rng(1).integers(0, 97, 1400).tolist()
    contexts, scored = [text[:320], text[:200], text[:517]], [text[320:400], text[200:330], text[517:523]]
    full = measure(wide, Parts(), contexts, scored=scored)
    found = measure(wide, parts, contexts, scored=scored)
    for one, whole in zip(found, full, strict=True):
        assert 0 < abs(one.nats - whole.nats) / whole.nats < 1e-3 and one.tokens == whole.tokens
    if strict:
        slow = measure(wide, parts, contexts, scored=scored, rows=1)
        assert [one.nats for one in found] == pytest.approx([one.nats for one in slow], rel=1e-9)


def test_windows_are_checked(target):
    with pytest.raises(ConfigError, match=r"window of 2049 tokens exceeds the context of 2048"):
        measure(target, Parts(), [[1] * 2000], scored=[[1] * 49])
    with pytest.raises(ConfigError, match="without context"):
        measure(target, Parts(), [[]], scored=[[1]])


def test_perplexity_is_e_to_the_mean_cost():
    assert perplexity(10 * math.log(7), 10) == pytest.approx(7)
    assert math.isnan(perplexity(0.0, 0)) and perplexity(1e6, 1) == math.inf
