"""Untrained drafts as systems of a suite: names, facts, and whose texts they must repeat."""

from __future__ import annotations

import pytest

from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import TreeShape
from longtrain.errors import ConfigError
from longtrain.systems import FULL_CACHE, Builder
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES


@pytest.fixture
def build(target):
    def go(*entries):
        shapes = [TreeShape((1, 1, 1))]
        return Builder(target, [Budget(40)], shapes, {}.__getitem__).systems(entries)

    return go


def test_their_texts_are_those_of_the_full_cache(build):
    snap = {"method": {"name": "magicdec", "policy": "snapkv", "budget": 0.5}, "label": "SnapKV draft"}
    found = build({"method": "magicdec"}, snap, {"method": {"name": "prompt_lookup", "ngram": 2}})
    assert [system.name for system in found] == ["full", "magicdec", "SnapKV draft", "prompt_lookup ngram=2"]
    assert all(system.drafts and system.lossless_of == FULL_CACHE.name for system in found[1:])
    assert found[2].facts["method"]["policy"] == "snapkv" and found[2].facts["method"]["budget"] == 0.5
    assert found[1].facts["method"]["least_tokens"] == 128 and found[3].facts["shape"] == [1, 1, 1]


def test_on_a_quantised_cache_they_repeat_its_texts():
    """QuantSpec's cache without its draft is what they are compared with."""
    shape = {**SHAPES["llama_micro"], "hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
    builder = Builder(random_target(shape, seed=0), [], [TreeShape((1, 1, 1))], {}.__getitem__)
    alone = {"method": {"name": "quantspec", "draft": False}}
    drafts = [{"method": {"name": name, "cache": "hierarchical"}} for name in ("magicdec", "prompt_lookup")]
    found = builder.systems([alone, *drafts, {"method": {"name": "quantspec", "split": "rtn"}}])
    assert [system.lossless_of for system in found[2:]] == [found[1].name, found[1].name, None]
    assert found[2].name == "magicdec cache=hierarchical" and found[2].parts.cache is not None
    with pytest.raises(ConfigError, match=r"method.cache=int4; allowed: plain, hierarchical"):
        builder.systems([{"method": {"name": "prompt_lookup", "cache": "int4"}}])


def test_beside_an_evictor_they_repeat_its_texts(build):
    found = build("snapkv", {"method": "prompt_lookup", "policy": "snapkv"})
    assert [system.name for system in found] == ["full", "snapkv@40", "prompt_lookup+snapkv@40"]
    assert found[2].evicts and found[2].drafts
    with pytest.raises(ConfigError, match=r"unknown key 'method\.tokens'; known: policy, budget"):
        build({"method": {"name": "magicdec", "tokens": 4}})
