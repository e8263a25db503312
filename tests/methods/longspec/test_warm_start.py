"""A draft that begins with the target's weights."""

from __future__ import annotations

import copy

import pytest
import torch

from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.spec import SPEC
from longtrain.methods.longspec.warm_start import CROSS_SHARE, LOUDNESS, _sizes

CONFIG = Config(window=300)


def test_norms_and_inputs_come_from_the_target(target):
    draft = SPEC.build(CONFIG, target.info)
    SPEC.objective(draft, target, CONFIG)
    first, last = target.layer_state(0), target.layer_state(target.info.full_layers[-1])
    same = {
        "self_attn.k_proj.weight": first["self_attn.k_proj.weight"],
        "input_layernorm.weight": first["input_layernorm.weight"],
        "post_cross_attention_layernorm.weight": first[f"{target.family.norms[1]}.weight"],
        "cross_attn.q_proj.weight": last["self_attn.q_proj.weight"],
        "post_self_attention_layernorm.weight": last["input_layernorm.weight"],
    }
    if target.info.hidden_act == "silu":  # an MLP of another activation is not copied
        same["mlp.gate_proj.weight"] = first["mlp.gate_proj.weight"]
    if target.info.qk_norm:
        same |= {f"{a}.q_norm.weight": s["self_attn.q_norm.weight"] for a, s in
                 (("self_attn", first), ("cross_attn", last))}  # fmt: skip
    if target.info.attention_bias:
        same |= {"self_attn.v_proj.bias": first["self_attn.v_proj.bias"],
                 "cross_attn.q_proj.bias": last["self_attn.q_proj.bias"]}  # fmt: skip
    mine = dict(draft.named_parameters())
    for name, tensor in same.items():
        torch.testing.assert_close(mine[name].double(), tensor.double(), rtol=1e-6, atol=1e-7)
    sizes = _sizes(draft.double(), target, CONFIG)
    assert sizes.draft / sizes.target == pytest.approx(LOUDNESS, rel=0.1)
    assert sizes.cross / sizes.stream == pytest.approx(CROSS_SHARE, rel=0.5)  # embeddings are not scaled


def test_loaded_weights_are_kept(llama):
    trained = SPEC.build(CONFIG, llama.info)
    draft = SPEC.build(CONFIG, llama.info)
    draft.load_state_dict(trained.state_dict())
    SPEC.objective(draft, llama, CONFIG)
    assert all(torch.equal(p, trained.state_dict()[n]) for n, p in draft.named_parameters())


def test_warm_start_repeats_and_can_be_left_out(llama):
    drafts = []
    for _ in range(2):
        draft = SPEC.build(CONFIG, llama.info)
        state = torch.get_rng_state()
        SPEC.objective(draft, llama, CONFIG)
        assert torch.equal(state, torch.get_rng_state())
        drafts.append(draft.state_dict())
    assert all(torch.equal(drafts[0][n], drafts[1][n]) for n in drafts[0])
    cold = Config(window=300, warm_start=False)
    draft = SPEC.build(cold, llama.info)
    before = copy.deepcopy(draft.state_dict())
    SPEC.objective(draft, llama, cold)
    assert all(torch.equal(p, before[n]) for n, p in draft.named_parameters())


@pytest.mark.parametrize("keys", [{"cross_attention": False}, {"final_norm": True}, {"kv_source_layer": 0}])
def test_variants(llama, keys):
    config = Config(window=300, **keys)
    draft = SPEC.build(config, llama.info)
    SPEC.objective(draft, llama, config)
    assert all(torch.isfinite(p).all() for p in draft.parameters())
    if draft.norm is not None:
        assert torch.equal(draft.norm.weight.double(), llama.final_norm_weight)
