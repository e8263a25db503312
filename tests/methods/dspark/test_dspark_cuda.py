"""On a GPU: the gradient of flash attention, steps and drafts that wait for nothing, and CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import ChildChoice, TreeShape
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.objective import DSparkObjective
from longtrain.methods.dspark.runtime import DSparkRuntime
from longtrain.methods.dspark.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from tests.decoding.tape import both
from tests.methods.drafts import check_drafting_on_both_devices, check_gradients_in_bf16, on

pytestmark = pytest.mark.gpu
SHAPE = {**SHAPES["llama_micro"], "num_hidden_layers": 4}
SMALL = Config(
    layers=[0, 2], n_layers=2, block_size=5, markov_rank=6, intermediate_size=40, anchor_every=1, mask_token=1
)
CONFIGS = {
    "all tokens": SMALL,
    "dflash": replace(SMALL, heads="none", sample_from_anchor=False),
    "a window": replace(SMALL, windows=[9, None]),
    "the target's keys": replace(SMALL, windows=[9, None], target_kv=True),
    "a vocabulary of its own": replace(SMALL, draft_vocab_size=40, objective="lk_hybrid"),
    "dflash2": replace(SMALL, heads="selector", sample_from_anchor=False, conv_taps=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_training_in_bf16_is_close_to_fp64_and_does_not_wait(name, make_draft, make_batch):
    config = CONFIGS[name]
    exact = random_target(SHAPE, seed=1, dtype=torch.float64, device="cpu")
    batch = make_batch(exact, [70, 3, 90, 1])
    check_gradients_in_bf16(make_draft, DSparkObjective, exact, config, batch)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("children", [ChildChoice.POINT, ChildChoice.IID])
def test_drafting_does_not_wait_and_equals_the_cpu(name, children, make_draft):
    config = CONFIGS[name]

    def runtime_of(target, device):
        return DSparkRuntime(make_draft(target, config, torch.float32).to(device), target, config)

    check_drafting_on_both_devices(on(SHAPE), runtime_of, children)


@pytest.mark.parametrize("shape", [TreeShape((1,) * 5), TreeShape((3, 4, 2))], ids=str)
def test_cuda_graphs_of_cut_trees_give_the_same_texts(shape, make_draft):
    """As below, where the number of nodes differs from cycle to cycle."""
    target = random_target(SHAPE, dtype=torch.float32, device="cuda").fuse()
    draft = make_draft(target, SMALL, torch.float32).cuda().requires_grad_(False)
    draft.confidence_head.proj.weight.mul_(0.3)
    draft.confidence_head.proj.bias.fill_(0.8)
    parts = SPEC.attach(draft, target, SMALL, {"min_confidence": 0.3})
    prompts = [torch.randint(2, 97, (n,)).tolist() for n in (90, 7, 33)]
    options = {"max_new_tokens": 48, "ignore_eos": True}
    drafted = both(target, parts, prompts, shape=shape, **options)
    assert drafted.tokens == Engine(target).generate(prompts, **options).tokens


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [TreeShape((1,) * 5), TreeShape((3, 4, 2))], ids=str)
def test_cuda_graphs_give_the_same_texts(name, shape, make_draft):
    """In fp32: kernels that sum in another order move logits by 1e-6, and texts of 48 tokens stay."""
    target = random_target(SHAPE, dtype=torch.float32, device="cuda").fuse()
    draft = make_draft(target, CONFIGS[name], torch.float32).cuda().requires_grad_(False)
    parts = SPEC.attach(draft, target, CONFIGS[name], {})
    gen = torch.Generator().manual_seed(0)
    for lengths in ((90, 7, 33), (300,)):
        prompts = [torch.randint(2, 97, (n,), generator=gen).tolist() for n in lengths]
        options = {"max_new_tokens": 48, "ignore_eos": True}
        drafted = both(target, parts, prompts, shape=shape, **options)
        assert drafted.tokens == Engine(target).generate(prompts, **options).tokens
