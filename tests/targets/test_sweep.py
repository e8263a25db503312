"""Random small checkpoints of every family: logits are transformers' own, or one line names the cause."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain.errors import LongtrainError
from longtrain.targets.loading import load_target
from longtrain.targets.step import OutputRequest, TokenBatch

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
CONFIGS = 60
THETAS = (10000, 10000.0, 500000.0, 1000000)
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES = (
    {"type": "default"},
    {"rope_type": "linear", "factor": 4},
    {"type": "linear", "factor": 2.5},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "type": "yarn",
        "factor": 2,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "attention_factor": 1.5,
    },
)
FAULTS = (
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads=3"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
    ({"head_dim": 9}, "head_dim=9"),
    (
        {"model_type": "llama", "layer_types": ["chunked_attention"] * 3, "num_hidden_layers": 3},
        "chunked_attention",
    ),
)
"""What a config says that is no model for us -> the words of the refusal."""


def drawn(seed):
    """Config values, how weights are stored, and the words of a refusal where there is a fault."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    kv_heads = rng.choice((1, 2, 3))
    heads, head_dim = kv_heads * rng.choice((1, 2, 3, 5)), rng.choice((8, 16, 20))
    tied = rng.random() < 0.5
    values = {
        "model_type": family,
        "vocab_size": 61,
        "hidden_size": rng.choice((heads * 8, 40, 48)),
        "intermediate_size": rng.choice((24, 56)),
        "num_hidden_layers": rng.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "hidden_act": rng.choice(("silu", "swish", "gelu")),
        "tie_word_embeddings": tied,
        "rope_theta": rng.choice(THETAS),
        "return_dict": True,
    }
    if values["hidden_size"] % heads:  # transformers' Llama wants a multiple even where head_dim says it
        values["hidden_size"] = heads * 8
    if values["hidden_size"] != heads * 8 or rng.random() < 0.7:
        values["head_dim"] = head_dim
    if rng.random() < 0.7:
        values["rope_scaling"] = rng.choice(ROPES)
    if family in ("llama", "qwen3"):
        values["attention_bias"] = rng.random() < 0.5
    if family == "llama":
        values["mlp_bias"] = rng.random() < 0.3
    if family == "mistral":
        values["sliding_window"] = rng.choice((None, 16, 128, 4096))
    if seed % 4:
        return values, rng, ""
    fault, cause = FAULTS[seed // 4 % len(FAULTS)]
    return {**values, **fault}, rng, cause


def stored(model, rng):
    """Tensors of a model as somebody stores them."""
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    tensors = {name: one.to(dtype) for name, one in model.state_dict().items()}
    if model.config.tie_word_embeddings and rng.random() < 0.7:
        del tensors["lm_head.weight"]
    elif rng.random() < 0.3:  # another head than the config says
        tensors["lm_head.weight"] = torch.randn_like(tensors["lm_head.weight"], dtype=torch.float32).to(dtype)
    tensors = {name: one.clone() for name, one in tensors.items()}
    if model.config.tie_word_embeddings and "lm_head.weight" not in tensors and rng.random() < 0.3:
        tensors = {name.removeprefix("model."): one for name, one in tensors.items()}
    return tensors


def write(folder, tensors, rng):
    """One file or shards, of safetensors or of torch."""
    names, ends = sorted(tensors), rng.choice((".safetensors", ".bin"))
    rng.shuffle(names)
    stem = "model" if ends == ".safetensors" else "pytorch_model"
    parts = [names[i::3] for i in range(3)] if rng.random() < 0.5 else [names]
    files = [f"{stem}-{i}{ends}" for i in range(3)] if len(parts) > 1 else [f"{stem}{ends}"]
    for file, part in zip(files, parts, strict=True):
        state = {name: tensors[name] for name in part}
        if ends == ".bin":
            torch.save(state, folder / file, _use_new_zipfile_serialization=rng.random() < 0.5)
        else:
            save_file(state, folder / file, metadata={"format": "pt"})
    if len(parts) > 1:
        index = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / f"{stem}{ends}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize("seed", range(CONFIGS))
def test_logits_are_those_of_transformers_or_the_cause_is_named(seed, tmp_path, tokenizer_folder):
    values, rng, cause = drawn(seed)
    folder = shutil.copytree(tokenizer_folder, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(values))
    torch.manual_seed(seed)
    if cause:
        torch.save({"lm_head.weight": torch.ones(1)}, folder / "pytorch_model.bin")
        with pytest.raises(LongtrainError) as caught:
            load_target(folder)
        assert cause in str(caught.value) and "\n" not in str(caught.value)
        return
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    write(folder, stored(model, rng), rng)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    target = load_target(folder, dtype="float64")
    ids_BT = torch.randint(0, 61, (2, 100), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        pos_BT = torch.arange(100).expand(2, -1)
        ours = target(
            TokenBatch(pos_BT, ids_BT=ids_BT), target.new_cache(2, 128, 128), outputs=OutputRequest("all")
        ).logits_BTV
        theirs = stock(ids_BT).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    ends = load_target(folder, dtype="float64", layers=False)
    assert ends.info == target.info and torch.equal(ends.head_weight, target.head_weight)


def test_the_sweep_meets_all_kinds():
    """So that a change of the draw above leaves nothing out."""
    found = [drawn(seed) for seed in range(CONFIGS)]
    sound = [values for values, _, cause in found if not cause]
    assert len(sound) >= 40 and {values["model_type"] for values in sound} == set(FAMILIES)
    kinds = {(values.get("rope_scaling") or {}).get(key) for values in sound for key in ("type", "rope_type")}
    assert kinds >= {"default", "linear", "llama3", "yarn"}
    assert {cause for *_, cause in found if cause} == {cause for _, cause in FAULTS}
