"""First weights: what each setting of the start does; a scaled norm guesses no worse than uniformly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from longtrain.data.packing.batch import Batch
from longtrain.methods.eagle3 import warm_start as module
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.spec import SPEC
from longtrain.targets.loading import load_target

SMALL = Config(layers=[0, 1], draft_vocab_size=512, depths=3, objective="kl", fc_norm=True, norm_output=True)


@pytest.fixture(scope="module")
def target():
    return load_target("tiny", dtype="float32")


def started(target, **settings):
    torch.manual_seed(0)
    config = replace(SMALL, **settings)
    return SPEC.objective(SPEC.build(config, target.info), target, config)


def first_loss(target, objective) -> float:
    """Nats of a label and depth."""
    ids = torch.randint(target.info.vocab_size, (96,), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(96) > 4
    batch = Batch(ids, (0, 96), mask, seed=0, tokens_in_step=int(mask.sum()), documents_in_step=1)
    loss = objective(batch)
    return loss.total.item() / loss.tokens / sum(SMALL.depth_decay**depth for depth in range(SMALL.depths))


@pytest.mark.parametrize(
    "settings", [{}, {"start_outputs": "random"}, {"start_mlp": "random"}, {"start_inputs": "level"}]
)
def test_a_scaled_norm_is_no_worse_than_uniform(target, settings):
    scaled = first_loss(target, started(target, **settings))
    copied = first_loss(target, started(target, **settings, start_norm="copied"))
    assert scaled < math.log(SMALL.draft_vocab_size) and scaled < copied


def test_the_norm_is_scaled_until_a_random_direction_is_nearly_uniform(target):
    draft = started(target).module
    direction = torch.randn(2000, draft.norm.weight.numel(), generator=torch.Generator().manual_seed(0))
    logits = direction * draft.norm.weight @ draft.lm_head.weight.t()
    assert logits.pow(2).mean().sqrt().item() == pytest.approx(module.SPREAD, rel=0.05)
    ratio = draft.norm.weight / target.final_norm_weight
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert started(target, start_norm="ones").module.norm.weight.eq(1).all()


def test_zero_outputs_pass_the_highest_level_on(target):
    draft = started(target, start_outputs="zero").module
    states = [torch.randn(5, draft.norm.weight.numel()) for _ in draft.layers]
    feature = draft.feature(states)
    _, residual = draft.enter(torch.randn_like(feature), feature)
    out, _ = draft.after_attention(residual, torch.randn(5, *_heads(draft)))
    torch.testing.assert_close(out, draft.norm(draft.fc_norm[-1](states[-1])))
    copied = target.layer_state(0)["mlp.up_proj.weight"]
    assert torch.equal(draft.mlp.up_proj.weight, copied)
    assert not torch.equal(started(target, start_mlp="random").module.mlp.up_proj.weight, copied)


def _heads(draft):
    return draft.self_attn.heads[0], draft.self_attn.head_dim


def test_level_turns_down_large_channels_alone(target):
    """Channels of normed states above the median one get its size; the others keep their own."""
    draft = started(target, start_inputs="level").module
    for norm, state in zip(draft.fc_norm, module.probed_states(target, draft.layers), strict=True):
        plain = (state / state.pow(2).mean(-1, keepdim=True).sqrt()).pow(2).mean(0).sqrt()
        median = plain.median()
        size = plain * norm.weight / norm.weight.max()
        assert norm.weight[plain <= median].unique().numel() == 1
        torch.testing.assert_close(size[plain > median], median.expand(int((plain > median).sum())))
    one = started(target, start_inputs="level", fc_norm=False, norm_before_fc=True).module
    assert one.input_norm.weight.unique().numel() > 1
