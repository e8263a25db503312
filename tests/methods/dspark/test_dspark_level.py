"""Channels at one size before `fc`: in training, in folders, and in a draft that was loaded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from longtrain.data.packing.batch import Batch
from longtrain.features.probe import probed_states
from longtrain.methods.dspark import level
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.fused import FusedDSpark
from longtrain.methods.dspark.level import without_factors
from longtrain.methods.dspark.spec import SPEC
from longtrain.targets.loading import load_target
from tests.helpers import noisy

LEVEL = Config(n_layers=2, markov_rank=8, intermediate_size=64, level_inputs=True)
PLAIN = replace(LEVEL, level_inputs=False)


@pytest.fixture(scope="module")
def target():
    return load_target("tiny", device="cpu")


def started(target, config):
    torch.manual_seed(0)
    module = SPEC.build(config, target.info)
    return module, SPEC.objective(module, target, config)


@torch.no_grad()
def alike(module, target) -> float:
    """Mean cosine of the inputs of keys and values of different tokens."""
    context = module.context(probed_states(target, module.read))
    unit = torch.nn.functional.normalize(context, dim=-1)
    cosine = unit @ unit.t()
    return float((cosine.sum() - len(cosine)) / (len(cosine) * (len(cosine) - 1)))


def test_level_makes_tokens_differ_where_large_channels_made_them_alike(target):
    plain, level = started(target, PLAIN)[0], started(target, LEVEL)[0]
    assert alike(plain, target) > 0.3 and alike(level, target) < 0.1
    size_N = level.joined(probed_states(target, level.read)).pow(2).mean(0).sqrt()
    torch.testing.assert_close(size_N, torch.ones_like(size_N), rtol=1e-5, atol=0)


@torch.no_grad()
def test_with_the_factors_in_fc_it_is_the_same_draft(target):
    level = noisy(started(target, LEVEL)[0])
    tensors, config = without_factors(level.state_dict(), LEVEL)
    plain = SPEC.build(config, target.info)
    plain.load_state_dict(tensors)
    states = probed_states(target, level.read)
    assert config == PLAIN
    torch.testing.assert_close(plain.context(states), level.context(states), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(FusedDSpark(level).context(states), level.context(states))


@torch.no_grad()
def test_the_first_loss_is_that_of_a_uniform_distribution(llama):
    """With small embeddings, as published models have them; the loss is the cross-entropy alone."""
    config = replace(LEVEL, ce_weight=1.0, l1_weight=0.0, confidence_weight=0.0)
    objective = started(llama, config)[1]
    size = llama.info.vocab_size
    ids = torch.randint(size, (60,), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(60) > 4
    loss = objective.eval()(Batch(ids, (0, 60), mask, seed=0, tokens_in_step=int(mask.sum())))
    assert float(loss.total) / loss.tokens < 1.02 * math.log(size)


def test_a_loaded_draft_keeps_its_factors(target):
    module, _ = started(target, LEVEL)
    again = SPEC.build(LEVEL, target.info)
    module.factor_N.mul_(2)
    again.load_state_dict(module.state_dict())
    SPEC.objective(again, target, LEVEL)
    assert torch.equal(again.factor_N, module.factor_N) and again.factor_N.unique().numel() > 1


def test_a_channel_that_is_0_in_what_is_measured_gets_no_enormous_factor(monkeypatch):
    state_TE = torch.tensor([[4.0, 2.0, 0.0, -1.0], [-4.0, 2.0, 0.0, 1.0]])
    monkeypatch.setattr(level, "probed_states", lambda target, layers: [state_TE])
    torch.testing.assert_close(level.level_factors(None, [0]), torch.tensor([0.25, 0.5, 100.0, 1.0]))
