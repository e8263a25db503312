"""Limits come from what the target's own rounding does; faults are judged in fp32, whatever it does."""

from __future__ import annotations

import copy

import pytest
import torch
from export_loop import cases, loop
from mutations import METHODS, made_of, table, verify

from longtrain.artifact.golden.checks import FAR, Check
from longtrain.artifact.golden.outputs import FLOOR, MULTIPLE, OUTPUTS, as_number
from longtrain.artifact.golden.wide import WideTarget
from longtrain.errors import ArtifactError
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest, TokenBatch

FORMER_LIMIT = 0.1
"""The fixed one in bf16: published models with sharp attention and huge activations round further off."""
SMALL = {"longspec": {"window": 16, "gain": 4.0}, "eagle3": {"draft_vocab_size": 0, "gain": 4.0}}


def sharp(dtype=torch.bfloat16):
    """A target with attention so sharp that rounding moves it, and with a channel of huge activations."""
    target = random_target({**SHAPES["llama_micro"], "num_hidden_layers": 6}, seed=0)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.q_proj.weight *= 2
            layer.self_attn.k_proj.weight *= 2
            layer.mlp.down_proj.weight[3] *= 20
    return target.to(dtype)


def last_states(target, ids_T):
    """The LM head's inputs and its logits of the last token."""
    rows = TokenBatch(torch.arange(len(ids_T))[None], ids_T[None])
    step = target.forward(
        rows, target.new_cache(1, len(ids_T), 0), outputs=OutputRequest("last", hidden=(0, -1))
    )
    return step.hidden[0], step.hidden[-1], step.logits_BTV


@torch.no_grad()
@pytest.mark.parametrize("shape", ["llama_micro", "qwen2_micro", "qwen3_micro", "mistral_micro"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_wide_target_is_the_target_in_fp32_and_leaves_it_as_it_is(shape, fused):
    target = random_target(shape, seed=3, dtype=torch.bfloat16)
    wanted = last_states(copy.deepcopy(target).float(), torch.arange(2, 50))
    target = target.fuse() if fused else target
    before = [(weight.data_ptr(), weight.dtype) for weight in target.parameters()]
    wide = WideTarget(target)
    for got, expected in zip(last_states(wide, torch.arange(2, 50)), wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert [(weight.data_ptr(), weight.dtype) for weight in target.parameters()] == before
    with pytest.raises(RuntimeError, match="stop"):
        wide.forward(
            TokenBatch(torch.arange(3)[None], torch.arange(3)[None]), wide.new_cache(1, 3, 0), hook=stop
        )
    assert [(weight.data_ptr(), weight.dtype) for weight in target.parameters()] == before
    assert not any(module._forward_pre_hooks for module in target.modules())


def stop(layer, *_):
    raise RuntimeError("stop")


@pytest.fixture(scope="module")
def coarse():
    """A target that rounds further off than the former limit, and an evictor for it."""
    target = sharp()
    return target, made_of("lookaheadkv", target)


def test_a_target_that_rounds_coarsely_verifies_where_the_former_limit_refused_it(coarse):
    target, made = coarse
    golden = made.golden
    scores, _ = golden._on_target(made._parts, target)
    assert float(golden.kind.distance(scores, golden.own["scores_LGT"]).max()) > FORMER_LIMIT
    for at_hand in (target, sharp().fuse(), sharp().float()):
        assert verify(golden, made._parts, at_hand) < 1e-5
    limit = golden.measure(made._parts, target)[-1].limit
    assert limit == pytest.approx(MULTIPLE * golden.noise[OUTPUTS]) and limit > FLOOR["bfloat16"]


def test_noise_of_another_dtype_is_measured_when_the_artifact_is_loaded(coarse):
    wide = sharp(torch.float32)
    made = made_of("lookaheadkv", wide)
    assert made.golden.noise == {}
    checks = made.golden.measure(made._parts, coarse[0])
    assert all(check.passed for check in checks) and checks[-1].limit > FLOOR["bfloat16"]
    assert made.golden.measure(made._parts, wide)[-1].limit == FLOOR["float32"]


def test_what_is_no_number_passes_no_limit():
    """The noise of a target that overflows is none either, and so would be four times as much."""
    assert not Check("x", as_number(torch.tensor(torch.nan)), MULTIPLE * FAR).passed
    assert Check("x", 0.3, MULTIPLE * 0.1).passed


def test_another_targets_rounding_is_no_excuse(coarse):
    """A target that the noise was not measured on: another seed."""
    _, made = coarse
    other = random_target({**SHAPES["llama_micro"], "num_hidden_layers": 6}, seed=1, dtype=torch.bfloat16)
    checks = made.golden.measure(made._parts, other)
    assert not next(check for check in checks if check.what == "the evictor and the target in fp32").passed
    quiet = made_of("kvzap", sharp())  # its module never asks the target
    with pytest.raises(ArtifactError, match=r"the module itself computes .* the target here gives other"):
        verify(quiet.golden, quiet._parts, other)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in METHODS), ("longspec", torch.float32), ("kvzap", torch.float32)],
)
def test_every_mutation_of_every_method_is_refused(name, dtype):
    """Judged in fp32, on a target that rounds coarsely in bf16."""
    target = sharp(dtype)
    lines = table(made_of(name, target, **SMALL.get(name, {})), target)
    assert [line for line in lines if line["outcome"] == "ACCEPTED"] == []
    refused = [line for line in lines if line["outcome"] == "refused"]
    assert len(refused) >= 2
    assert all(line["margin"] is None or line["margin"] > 1 for line in refused)
    if name == "lookaheadkv":
        assert {line["outcome"] for line in lines} <= {"refused", "checksum alone"}
        assert all(line["margin"] is not None for line in refused)
        assert {"positions off by one", "another rotary base", "reduction over heads"} <= {
            line["mutation"] for line in refused
        }


def test_the_loop_of_exports_covers_every_method_in_every_dtype():
    assert {(method, dtype) for _, dtype, method in cases(20)} == {
        (method, dtype) for method in METHODS for dtype in ("bfloat16", "float32")
    }
    assert {seed for seed, *_ in cases(20)} == set(range(5))


@pytest.mark.slow
def test_what_was_exported_is_never_refused_with_the_same_weights():
    lines = list(loop("tiny", count=20, device="cpu"))
    assert len(lines) == 20 and not any(line["refused"] for line in lines)
