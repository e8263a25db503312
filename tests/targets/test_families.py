"""Every family of `tests/families.py` against transformers, from a checkpoint as transformers writes it."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from longtrain.costs.model import Experts, Sizes
from longtrain.errors import ArtifactError, TargetMismatchError
from longtrain.targets.families import FAMILIES as ENTRIES
from longtrain.targets.families import experts
from longtrain.targets.int4 import Int4Target
from longtrain.targets.loading import load_target, random_target
from longtrain.targets.step import OutputRequest, TokenBatch
from longtrain.targets.weights import stored_values
from tests.families import EXPERTS, FAMILIES, drawn, usual

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""fp64 weights: norms, angles and routers compute in fp32 inside these models, whatever the dtype."""
SEEDS = 8


def checkpoint(tmp_path, tokenizer_folder, values, seed):
    """Write a random model as transformers does, and return its folder."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / f"model{seed}")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.float32)
    with torch.no_grad():
        for name, value in stored_values(model):
            if value.dim() and not name.endswith(("beta", "eps")):
                value.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


@contextmanager
def routed(model):
    """Record the experts of each token, sorted, by layer."""
    found = []

    def keep(_module, _inputs, output):
        found.append(output[2].sort(-1)[0].reshape(-1, output[2].shape[-1]))

    routers = [one for name, one in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    handles = [one.register_forward_hook(keep) for one in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def run(target, ids_BT, cuts=()):
    """Logits of a text that is read in pieces."""
    B, T = ids_BT.shape
    cache, found = target.new_cache(B, T, T), []
    for first, last in zip((0, *cuts), (*cuts, T), strict=True):
        rows = TokenBatch(torch.arange(first, last).expand(B, -1), ids_BT[:, first:last])
        found.append(target(rows, cache, outputs=OutputRequest("all")).logits_BTV)
        cache.commit(None, torch.full((B,), last - first))
    return torch.cat(found, 1)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_experts_are_those_of_transformers(family, tmp_path, tokenizer_folder):
    """Eager and sdpa, fused layers or the model's own, at once, in chunks, and one by one."""
    for seed in range(SEEDS):
        folder = checkpoint(tmp_path, tokenizer_folder, drawn(family, seed), seed)
        ids_BT = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(seed))
        stock = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        with routed(stock) as theirs:
            expected = stock(ids_BT).logits
        stock.set_attn_implementation("eager")
        torch.testing.assert_close(stock(ids_BT).logits, expected, **CLOSE)
        target = load_target(folder, dtype="float64")
        with routed(target.model) as ours:
            torch.testing.assert_close(run(target, ids_BT), expected, **CLOSE)
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
        ends = load_target(folder, dtype="float64", layers=False)
        assert ends.info == target.info
        for cuts in ((7, 8, 11), tuple(range(1, 12))):
            torch.testing.assert_close(run(target, ids_BT, cuts), expected, **CLOSE)
            target.fuse()
        shutil.rmtree(folder)


@torch.no_grad()
@pytest.mark.parametrize("family", EXPERTS)
def test_in_bf16_rows_of_a_pass_equal_single_tokens_within_its_noise(family):
    """And the experts of a token do not depend on the rows beside it, unless two scores are close."""
    target = random_target(usual(family), dtype="bfloat16")
    ids_BT = torch.randint(2, 97, (1, 24), generator=torch.Generator().manual_seed(1))
    with routed(target.model) as whole:
        together = run(target, ids_BT, (16,))
    with routed(target.model) as single:
        alone = run(target, ids_BT, tuple(range(1, 24)))
    noise = (together.float() - alone.float()).abs().mean() / together.float().abs().mean()
    assert noise < 0.03
    layers = len(whole) // 2
    pairs = [(torch.cat(whole[layer::layers]), torch.cat(single[layer::layers])) for layer in range(layers)]
    assert sum(int((a != b).any(-1).sum()) for a, b in pairs) <= 0.05 * 24 * layers


@pytest.mark.corners
@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EXPERTS)
def test_long_prompts_go_through_the_experts_in_pieces(family, dtype, monkeypatch):
    target = random_target(usual(family), dtype=dtype)
    ids_BT = torch.randint(2, 97, (1, 24), generator=torch.Generator().manual_seed(1))
    whole = run(target, ids_BT)
    monkeypatch.setattr(experts, "EXPERT_NUMBERS", 5 * 2 * 48)
    torch.testing.assert_close(run(target, ids_BT), whole, rtol=0.02, atol=0.02)


def test_every_family_has_its_row_here():
    others = {"llama", "qwen2", "qwen3", "mistral"}  # of `test_target_forward`
    windows = {name for name, entry in ENTRIES.items() if not entry.fused}  # of `test_window_layers`
    assert set(FAMILIES) | others | windows == set(ENTRIES)


def test_an_experts_weight_that_is_missing_is_named(tmp_path, tokenizer_folder):
    folder = checkpoint(tmp_path, tokenizer_folder, usual("qwen3_moe"), 0)
    tensors = load_file(folder / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in tensors, "transformers stores expert by expert"
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ArtifactError, match=r"lacks a weight of expert 3 of model.layers.1.mlp.experts.gate_up"
    ):
        load_target(folder)


def test_layers_that_predict_later_tokens_are_left_out(tmp_path, tokenizer_folder):
    """GLM-4.5 stores one after its last layer (`num_nextn_predict_layers`)."""
    folder = checkpoint(tmp_path, tokenizer_folder, usual("glm4_moe"), 0)
    expected = load_target(folder).info
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(4, 4)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load_target(folder).info == expected


@pytest.mark.parametrize("family", EXPERTS)
def test_the_router_keeps_its_own_precision(family, tmp_path, tokenizer_folder):
    """As transformers loads it: GLM's router is in fp32 in every dtype."""
    folder = checkpoint(tmp_path, tokenizer_folder, usual(family), 0)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours = dict(stored_values(load_target(folder, dtype="bfloat16").model))
    for name, value in stored_values(stock):
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted(family):
    for values in [usual(family), *(drawn(family, seed) for seed in range(8))]:
        model = random_target(values).model
        whole = sum(
            value.numel()
            for name, value in model.named_parameters()
            if value.dim() > 1 and name.startswith("model.layers") and not name.endswith("bias")
        )
        size = Sizes.of(random_target(values).info)
        assert size == Sizes.of_keys(values)
        gated = whole if family != "apertus" else whole + len(model.model.layers) * 80 * size.hidden_size
        assert size.weights == gated


def test_distinct_experts_that_a_pass_reads():
    """128 experts, 8 a token: the figures of a pass over 1, 8 and 64 tokens."""
    have = Experts(128, 8, 768)
    assert have.read(1) == pytest.approx(8)
    assert have.read(8) == pytest.approx(128 * (1 - (120 / 128) ** 8))
    rng = torch.Generator().manual_seed(0)
    drawn_ids = [
        len({int(i) for _ in range(8) for i in torch.randperm(128, generator=rng)[:8]}) for _ in range(300)
    ]
    assert have.read(8) == pytest.approx(sum(drawn_ids) / 300, rel=0.02)
    size = Sizes.of_keys(usual("qwen3_moe"))
    assert size.used == size.read(1) < size.read(4) < size.read(10**6) == size.weights


def test_a_checkpoint_in_mxfp4_is_expanded_exactly(tmp_path, tokenizer_folder):
    """As gpt-oss is published: bytes of two numbers and their powers, which transformers expands alike."""
    values = {**usual("gpt_oss", intermediate_size=64), "hidden_size": 32, "num_hidden_layers": 1}
    folder = checkpoint(tmp_path, tokenizer_folder, {**values, "layer_types": ["full_attention"]}, 0)
    tensors, rng, expected = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0), {}
    for leaf, rows, columns in (("gate_up_proj", 128, 32), ("down_proj", 32, 64)):
        name = f"model.layers.0.mlp.experts.{leaf}"
        del tensors[name]
        blocks = torch.randint(256, (8, rows, columns // 32, 16), dtype=torch.uint8, generator=rng)
        powers = torch.randint(110, 131, (8, rows, columns // 32), dtype=torch.uint8, generator=rng)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": powers}
        expected[name] = _convert_moe_packed_tensors(blocks, powers, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
    )
    found = dict(stored_values(load_target(folder).model))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"has \S+down_proj_blocks and no \S+down_proj_scales"):
        load_target(folder)


def test_artifacts_compare_experts_and_which_dims_are_rotated():
    info = random_target(usual("glm4_moe")).info
    assert info.from_json(info.to_json()) == info
    for other in ({"num_experts_per_tok": 3}, {"partial_rotary_factor": 0.25}):
        with pytest.raises(TargetMismatchError, match=r"experts=|rope="):
            info.check(random_target(usual("glm4_moe", **other)).info)
    assert "experts" not in random_target(usual("glm4")).info.to_json()


def test_4_bit_weights_of_experts_are_refused_by_name():
    with pytest.raises(
        TargetMismatchError, match=r"experts.gate_up_proj\), and only linear layers get 4-bit"
    ):
        Int4Target(random_target(usual("mixtral")), group=16)


def test_of_a_model_that_reads_images_the_text_model_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(TargetMismatchError, match=r"\(gemma3\) reads more than text; .*\(gemma3_text\)"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "qwen3_next"}, "gated delta net"),
        ({"model_type": "qwen3_5"}, "gated delta net"),
        ({"model_type": "qwen3_5_moe"}, "gated delta net"),
        ({"model_type": "gemma4"}, "Gemma 4"),
        ({"model_type": "deepseek_v3"}, "MLA"),
        ({"model_type": "kimi_k25"}, "MLA"),
        ({"model_type": "kimi_k3"}, "MLA"),
        ({"model_type": "glm4_moe_lite"}, "MLA"),
        ({"model_type": "kimi_linear"}, "recurrent"),
        ({"model_type": "nemotron_h"}, "recurrent"),
        ({"model_type": "lfm2"}, "recurrent"),
        ({"model_type": "llama4"}, "Llama 4"),
        ({"model_type": "llama4_text"}, "Llama 4"),
    ],
)
def test_families_that_are_not_served_are_refused_by_what_is_missing(values, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(TargetMismatchError) as caught:
        load_target(tmp_path)
    told = str(caught.value)
    assert words in told and "\n" not in told and values["model_type"] in told
