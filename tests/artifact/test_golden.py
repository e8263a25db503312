"""Every fault that has made published drafts useless must move the golden outputs; rounding must not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from longtrain import methods
from longtrain.artifact import Golden
from longtrain.decoding.roles import Parts
from longtrain.errors import ArtifactError
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.target.loading import random_target


class Faulty:
    """A target as a draft with a fault would use it."""

    def __init__(self, target, rope):
        self._target, self._rope = target, rope

    def __getattr__(self, name):
        return getattr(self._target, name)

    def rope(self, pos):
        return self._rope(self._target, pos)


def other_base(target, pos):
    half = target.info.head_dim // 2
    angle = pos[..., None].float() / 2e4 ** (torch.arange(half) / half)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def with_rope(rope):
    return lambda module, target, config: Parts(LongSpecRuntime(module, Faulty(target, rope), config))


def with_config(**changes):
    def attach(module, target, config):
        changed = dataclasses.replace(config, **changes)
        other = methods.get("longspec").build(changed, target.info).to(target.dtype)
        other.load_state_dict(module.state_dict())
        return Parts(LongSpecRuntime(other, target, changed))

    return attach


def forgetful(module, target, config):
    draft = LongSpecRuntime(module, target, config)
    draft.observe = lambda tree, verdict, step: None
    return Parts(draft)


def late(module, target, config):
    """The accepted path is written one position too far."""
    draft = LongSpecRuntime(module, target, config)
    take = draft._take

    def shifted(tokens, pos, valid):
        take(tokens, pos + 1, valid)

    draft._take = shifted
    return Parts(draft)


FAULTS = {
    "positions off by one": with_rope(lambda target, pos: target.rope(pos + 1)),
    "wrong rope base": with_rope(other_base),
    "no rope": with_rope(lambda target, pos: target.rope(torch.zeros_like(pos))),
    "dropped window": with_config(window=10_000),
    "window off by one": with_config(window=17),
    "another layer's keys": with_config(kv_source_layer=0),
    "accepted tokens forgotten": forgetful,
    "ring off by one": late,
}


def correct(module, target, config):
    return methods.get("longspec").attach(module, target, config, {})


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(made, module, target, config, fault):
    with pytest.raises(ArtifactError, match="golden outputs are not reproduced"):
        made.golden.verify(lambda: FAULTS[fault](module, target, config), target)


def test_the_right_module_passes_again_and_again(made, module, target, config):
    for _ in range(2):
        assert made.golden.verify(lambda: correct(module, target, config), target) < 1e-6


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-5), (torch.bfloat16, 0.04)])
def test_rounding_passes(made, module, config, dtype, most):
    other = random_target("llama_micro", seed=0).to(dtype)
    error = made.golden.verify(lambda: correct(module, other, config), other)
    assert 0 < error < most


@pytest.mark.parametrize("fault", ["positions off by one", "wrong rope base", "another layer's keys"])
def test_gross_faults_are_caught_in_half_precision_too(made, module, config, fault):
    other = random_target("llama_micro", seed=0).to(torch.bfloat16)
    half = methods.get("longspec").build(config, other.info).to(torch.bfloat16)
    half.load_state_dict(module.state_dict())
    golden = Golden.record(lambda: correct(half, other, config), other, tokens=32)
    assert golden.dtype == "bfloat16"
    with pytest.raises(ArtifactError, match="not reproduced"):
        golden.verify(lambda: FAULTS[fault](half, other, config), other)


def test_not_a_number_is_caught(made, module, target, config):
    broken = methods.get("longspec").build(config, target.info)
    broken.load_state_dict(module.state_dict())
    broken.mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ArtifactError, match="not reproduced"):
        made.golden.verify(lambda: correct(broken, target, config), target)


def test_prompt_is_longer_than_the_window(made, config):
    assert len(made.golden.ids_T) > config.window


def test_shapes_that_do_not_fit_are_refused(made):
    tensors = made.golden.tensors()
    with pytest.raises(ArtifactError, match="do not fit"):
        Golden.from_tensors(tensors | {"roots_C": torch.zeros(5, dtype=torch.int64)}, "float32")
    del tensors["logq_CDV"]
    with pytest.raises(ArtifactError, match="lacks logq_CDV"):
        Golden.from_tensors(tensors, "float32")
