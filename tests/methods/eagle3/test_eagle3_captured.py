"""Captured cycles of a draft with hidden states: a CUDA graph of one cycle is every cycle."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.runtime import Eagle3Runtime
from longtrain.methods.eagle3.spec import SPEC
from longtrain.targets.loading import random_target
from tests.decoding.micro import prompts_of, snapkv
from tests.decoding.micro import target as micro
from tests.decoding.tape import both, tapes  # noqa: F401 (a fixture)
from tests.methods.drafts import check_drafting_on_both_devices, on

SMALL = {"layers": [0, 1], "draft_vocab_size": 40, "depths": 4}
CONFIGS = {
    "all positions": Config(**SMALL, fc_norm=True),
    "a window and sinks": Config(**SMALL, window=8, sinks=3, norm_output=True),
    "its own rope": Config(**SMALL, rope={"rope_type": "default", "rope_theta": 700.0}, head_dim=16),
}
CHAIN, TREE = TreeShape((1, 1, 1, 1)), TreeShape((3, 4, 2))
WARM = Sampling(temperature=0.9, top_p=0.95, seed=3)


@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    [
        pytest.param("all positions", CHAIN, Sampling(), marks=pytest.mark.slow),
        ("all positions", TreeShape((2, 4), ChildChoice.IID), WARM),
        ("a window and sinks", TREE, WARM),
        ("its own rope", TREE, Sampling()),
        ("all positions", TreeShape((3, 3, 3), keep=7), Sampling()),
    ],
)
def test_a_cycle_can_be_replayed(name, shape, sampling, make_draft, tapes):  # noqa: F811
    target = micro()
    parts = SPEC.attach(make_draft(target, CONFIGS[name]), target, CONFIGS[name], {})
    options = {"max_new_tokens": 12, "sampling": sampling, "ignore_eos": True}
    drafted = both(target, parts, prompts_of(30, 1, 12), shape=shape, **options)
    assert len(tapes) == 1
    if shape.children is ChildChoice.POINT:
        assert drafted.tokens == Engine(target).generate(prompts_of(30, 1, 12), **options).tokens
    static = Engine(target, parts, capture=True)
    for prompts in (prompts_of(30, 1, 12), prompts_of(8, 25, 3)):  # of other lengths, with the same graph
        static.generate(prompts, shape=shape, **options)
    assert len(tapes) == 2


@pytest.mark.parametrize("name", ["all positions", "a window and sinks"])
def test_evicted_prompts(name, make_draft, tapes):  # noqa: F811
    target = micro()
    parts = SPEC.attach(make_draft(target, CONFIGS[name]), target, CONFIGS[name], {})
    evicted = Parts(evictor=snapkv(12), name="snapkv")
    options = {"max_new_tokens": 12, "ignore_eos": True}
    drafted = both(target, parts.merge(evicted), prompts_of(40, 40), shape=TREE, **options)
    assert drafted.tokens == Engine(target, evicted).generate(prompts_of(40, 40), **options).tokens
    assert len(tapes) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("children", [ChildChoice.POINT, ChildChoice.IID])
def test_drafting_does_not_wait_and_equals_the_cpu(name, children, make_draft):
    config = CONFIGS[name]

    def runtime_of(target, device):
        return Eagle3Runtime(make_draft(target, config, torch.float32).to(device), target, config)

    check_drafting_on_both_devices(on("llama_micro"), runtime_of, children)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_cuda_graphs_give_the_same_texts(name, shape, make_draft):
    """In fp32: kernels that sum in another order move logits by 1e-6, and texts of 48 tokens stay."""
    target = random_target("llama_micro", dtype=torch.float32, device="cuda").fuse()
    draft = make_draft(target, CONFIGS[name], torch.float32).cuda().requires_grad_(False)
    parts = SPEC.attach(draft, target, CONFIGS[name], {})
    for prompts in (prompts_of(90, 7, 33), prompts_of(300)):
        options = {"max_new_tokens": 48, "ignore_eos": True}
        drafted = both(target, parts, prompts, shape=shape, **options)
        assert drafted.tokens == Engine(target).generate(prompts, **options).tokens
