"""Hugging Face's loop over the same weights: the engine's own text, by another road."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.targets.loading import random_target
from longtrain.targets.stock import cache_keyword, decode_stock

PROMPTS = torch.randint(2, 97, (2, 11), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("family", ["llama_micro", "qwen3_micro"])
@pytest.mark.parametrize("fused", [False, True])
def test_it_gives_the_engines_text(family, fused):
    target = random_target(family, dtype="float64")
    if fused:
        target.fuse()
    stock = decode_stock(target, PROMPTS, max_new_tokens=12)
    own = Engine(target).generate(PROMPTS, max_new_tokens=12, ignore_eos=True)
    assert stock.tokens == own.tokens
    assert stock.prefill_s > 0 and stock.decode_s > 0


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_has_the_name_of_the_installed_transformers(name):
    """Decoding calls it by that name alone: a version with the other name knows none of this one."""
    target = random_target("llama_micro", dtype="float64")
    expected = decode_stock(target, PROMPTS, max_new_tokens=4).tokens
    usual, forward = cache_keyword(target.model), target.model.forward

    def old(ids, cache=None, **keys):
        out = forward(ids, **{usual: cache}, **keys)
        return SimpleNamespace(logits=out.logits, cache=getattr(out, usual))

    def older(ids, past_key_values=None, **keys):
        out = forward(ids, **{usual: past_key_values}, **keys)
        return SimpleNamespace(logits=out.logits, past_key_values=getattr(out, usual))

    target.model.forward = {"cache": old, "past_key_values": older}[name]
    assert cache_keyword(target.model) == name
    assert decode_stock(target, PROMPTS, max_new_tokens=4).tokens == expected
