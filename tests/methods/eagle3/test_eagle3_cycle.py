"""What a cycle is said to cost, against the module's own tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.costs.model import Sizes
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.cycle import cycle, draft_weights
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.targets.loading import random_target

CONFIG = Config(layers=[0, 1], draft_vocab_size=40)


@pytest.mark.parametrize(
    "changes", [{}, {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "draft_vocab_size": 0}]
)
def test_weights_are_those_of_the_module(changes):
    config, info = replace(CONFIG, **changes), random_target("llama_micro").info
    with torch.device("meta"):
        draft = Eagle3Draft(config, info)
    matrices = {name: p.numel() for name, p in draft.named_parameters() if p.ndim == 2}
    level, fc = draft_weights(config, Sizes.of(info))
    assert fc == matrices.pop("fc.weight") and level == sum(matrices.values())


def test_a_window_bounds_what_levels_read():
    size = Sizes.of(random_target("llama_micro").info)
    row = 2 * 2 * size.n_kv_heads * size.head_dim

    def read(config, context):
        draft = cycle(config, size, (1, 1), 2).draft
        return sum(one.times * one.phase(size, batch=1, context=context).whole.bytes for one in draft)

    windowed = replace(CONFIG, window=32, sinks=4)
    assert read(CONFIG, 1000) - read(CONFIG, 900) == pytest.approx(2 * 100 * row)
    assert read(windowed, 1000) == read(windowed, 900) == read(CONFIG, 36)
    cost = cycle(windowed, size, (1, 1), 2)
    assert cost.cache_bytes(3, 1000) == 3 * (size.kv_bytes(1000) + 36 * row)
