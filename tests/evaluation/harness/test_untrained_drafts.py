"""Untrained drafts as systems of a suite: names, facts, and whose texts they must repeat."""

from __future__ import annotations

import pytest

from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import TreeShape
from longtrain.errors import ConfigError
from longtrain.evaluation.systems import FULL_CACHE, Builder

from .toys import suite


@pytest.fixture
def build(target):
    def go(*entries):
        shapes = [TreeShape((1, 1, 1))]
        return Builder(target, [Budget(40)], shapes, {}.__getitem__).systems(suite(), entries)

    return go


def test_their_texts_are_those_of_the_full_cache(build):
    snap = {"method": {"name": "magicdec", "policy": "snapkv", "budget": 0.5}, "label": "SnapKV draft"}
    found = build({"method": "magicdec"}, snap, {"method": {"name": "prompt_lookup", "ngram": 2}})
    assert [system.name for system in found] == ["full", "magicdec", "SnapKV draft", "prompt_lookup ngram=2"]
    assert all(system.drafts and system.lossless_of == FULL_CACHE.name for system in found[1:])
    assert found[2].facts["method"]["policy"] == "snapkv" and found[2].facts["method"]["budget"] == 0.5
    assert found[1].facts["method"]["least_tokens"] == 128 and found[3].facts["shape"] == [1, 1, 1]


def test_beside_an_evictor_they_repeat_its_texts(build):
    found = build("snapkv", {"method": "prompt_lookup", "policy": "snapkv"})
    assert [system.name for system in found] == ["full", "snapkv@40", "prompt_lookup+snapkv@40"]
    assert found[2].evicts and found[2].drafts
    with pytest.raises(ConfigError, match="magicdec has no option 'tokens'; known: policy, budget"):
        build({"method": {"name": "magicdec", "tokens": 4}})
