"""What `plan` says of a training step, against tensors that are there."""

from __future__ import annotations

from dataclasses import replace

import torch

from longtrain.costs.model import Sizes
from longtrain.costs.training import PackedSequence
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.cost import training
from longtrain.methods.eagle3.objective import Eagle3Objective
from longtrain.methods.eagle3.spec import SPEC
from longtrain.targets.shapes import SHAPES

LLAMA = Sizes.of_keys(SHAPES["llama31_8b"])


def cost(tokens, config=Config()):  # noqa: B008
    return training(config, LLAMA, PackedSequence(tokens, tokens), 425_000_000, 2)


def test_inputs_are_the_levels_and_the_last_state(llama, make_draft, make_batch):
    config = Config(layers=[0, 1], draft_vocab_size=31)
    objective = Eagle3Objective(make_draft(llama, config), llama, config)
    hidden = objective._read(make_batch(llama, [40])).hidden
    size = Sizes.of(llama.info)
    step = training(config, size, PackedSequence(40, 40), 1000, 8)
    assert step.hidden == 3 * size.hidden_size
    assert step.inputs == sum(x.nbytes for x in hidden.values()) + 40 * 8


def test_a_chunked_step_grows_by_keys_and_values_alone():
    short, long = cost(8192), cost(131072)
    kv = 2 * 1024 * (131072 - 8192)
    assert long.module - short.module == kv * (2 * 2 + 4)  # in 16 bits twice, and summed up in fp32
    assert long.module < 1.2 * short.module
    assert long.module + long.inputs < 25 * 2**30
    assert cost(131072, Config(chunk_tokens=0)).module > 8 * long.module


def test_windows_and_frozen_heads_save_what_they_do_not_need():
    plain = cost(131072)
    near = cost(131072, Config(window=2047))
    assert near.flops - near.attention_flops == plain.flops - plain.attention_flops
    assert near.attention_flops < plain.attention_flops / 20
    assert cost(131072, Config(head="frozen")).flops < plain.flops


def test_the_trained_weights_of_the_published_shape():
    """425 M at Llama 3.1 8B: fc 50, attention 67, MLP 176, the head over 32000 tokens 131."""
    from longtrain.targets.loading import random_target

    info = replace(
        random_target("llama_micro").info,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        hidden_size=4096,
        intermediate_size=14336,
        vocab_size=128256,
    )
    with torch.device("meta"):
        module = SPEC.build(Config(), info)
    assert round(sum(p.numel() for p in module.parameters()) / 1e6) == 425
