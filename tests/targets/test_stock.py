"""Hugging Face's loop over the same weights: the engine's own text, by another road."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.errors import ConfigError
from longtrain.targets.loading import random_target
from longtrain.targets.stock import decode_stock

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


def test_prompts_are_of_one_length():
    with pytest.raises(ConfigError, match=r"prompts of \[1, 2\] tokens"):
        decode_stock(random_target("llama_micro"), [[5], [6, 7]], max_new_tokens=2)
