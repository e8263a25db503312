"""Every fault that has made published drafts useless must move the golden outputs; rounding must not."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from mutations import verify

from longtrain import methods
from longtrain.artifact.golden import KINDS, Golden
from longtrain.decoding.roles import Parts
from longtrain.errors import ArtifactError
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.targets.loading import random_target

CAUGHT = "golden outputs are not reproduced|which the artifact does not hold"


class Faulty:
    """A target as a draft with a fault would use it."""

    def __init__(self, target, rope):
        self._target, self._rope = target, rope

    def __getattr__(self, name):
        return getattr(self._target, name)

    def rope(self, pos):
        return self._rope(self._target, pos)

    @property
    def rotation(self):
        return self.rope


def other_base(target, pos):
    half = target.info.head_dim // 2
    angle = pos[..., None].float() / 2e4 ** (torch.arange(half) / half)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def fitting(module, target):
    return copy.deepcopy(module).to(target.dtype)


def with_rope(rope):
    def attach(module, target, config):
        return Parts(LongSpecRuntime(fitting(module, target), Faulty(target, rope), config))

    return attach


def with_config(**changes):
    def attach(module, target, config):
        changed = dataclasses.replace(config, **changes)
        other = methods.get("longspec").build(changed, target.info)
        other.load_state_dict(module.state_dict())
        return Parts(LongSpecRuntime(other.to(target.dtype), target, changed))

    return attach


def forgetful(module, target, config):
    draft = LongSpecRuntime(fitting(module, target), target, config)
    draft.observe = lambda tree, verdict, step: None
    return Parts(draft)


def late(module, target, config):
    """The accepted path is written one position too far."""
    draft = LongSpecRuntime(fitting(module, target), target, config)
    take = draft._take

    def shifted(tokens, path, first, count):
        take(tokens, path, first + 1, count)

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
    with pytest.raises(ArtifactError, match=CAUGHT):
        verify(made.golden, lambda view: FAULTS[fault](module, view, config), target)


def test_the_right_module_passes_again_and_again(made, module, target, config):
    for _ in range(2):
        assert verify(made.golden, lambda view: correct(module, view, config), target) < 1e-6


@pytest.fixture(scope="module")
def rounded():
    """One target in fp32 and in bf16: the weights are the same numbers."""
    wide = random_target("llama_micro", seed=0)
    half = random_target("llama_micro", seed=0, dtype=torch.bfloat16)
    half.load_state_dict(wide.state_dict())
    wide.load_state_dict(half.state_dict())
    return wide, half


def test_rounding_passes(rounded, module, config):
    wide, half = rounded
    golden = Golden.record(KINDS["laws"], lambda view: correct(module, view, config), half, tokens=32)
    assert golden.dtype == "bfloat16" and golden.inputs["k_1"].dtype == torch.bfloat16
    assert verify(golden, lambda view: correct(module, view, config), half) < 1e-5
    assert verify(golden, lambda view: correct(module, view, config), wide) < 1e-5


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught_in_half_precision_too(rounded, module, config, fault):
    half = rounded[1]
    golden = Golden.record(KINDS["laws"], lambda view: correct(module, view, config), half, tokens=32)
    with pytest.raises(ArtifactError, match=CAUGHT):
        verify(golden, lambda view: FAULTS[fault](module, view, config), half)


def test_another_target_s_keys_are_caught(made, module, config):
    other = random_target("llama_micro", seed=1)
    with pytest.raises(ArtifactError, match=r"not reproduced by"):
        verify(made.golden, lambda view: correct(module, view, config), other)


def test_not_a_number_is_caught(made, module, target, config):
    broken = methods.get("longspec").build(config, target.info)
    broken.load_state_dict(module.state_dict())
    broken.mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ArtifactError, match=CAUGHT):
        verify(made.golden, lambda view: correct(broken, view, config), target)


def test_prompt_is_longer_than_the_window(made, config):
    assert len(made.golden.own["ids_T"]) > config.window


def test_shapes_that_do_not_fit_are_refused(made, module, target, config):
    tensors = made.golden.tensors()
    others = tensors | {"roots_C": torch.zeros(5, dtype=torch.int64)}
    golden = Golden.from_tensors(KINDS["laws"], others, "float32")
    with pytest.raises(ArtifactError, match="cannot be asked for its golden laws"):
        golden.measure(lambda view: correct(module, view, config), target)
    del tensors["logq_CDV"]
    with pytest.raises(ArtifactError, match="lacks logq_CDV"):
        Golden.from_tensors(KINDS["laws"], tensors, "float32")
