"""What is trained, how much of it, how it begins, and settings that are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from longtrain import methods
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.targets.info import LayerInfo, TargetInfo

PUBLISHED = {  # layers, query heads, KV heads, head dim, hidden, intermediate -> M parameters, % of the model
    "llama32_1b": ((16, 32, 8, 64, 2048, 8192), 5.42, 0.44, 1.236),
    "llama32_3b": ((28, 24, 8, 128, 3072, 8192), 11.94, 0.37, 3.213),
    "llama31_8b": ((32, 32, 8, 128, 4096, 14336), 20.59, 0.26, 8.030),
    "qwen3_1b7": ((28, 16, 8, 128, 2048, 6144), 8.55, 0.42, 2.032),
    "qwen3_4b": ((36, 32, 8, 128, 2560, 9728), 16.25, 0.40, 4.022),
    "qwen3_8b": ((36, 32, 8, 128, 4096, 12288), 21.50, 0.26, 8.191),
}


def info_of(layers, heads, kv, dim, hidden, inner, **changes):
    values = {
        "name": "shape",
        "family": "llama",
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": kv,
        "head_dim": dim,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": 128,
        "max_positions": 4096,
        "rms_norm_eps": 1e-5,
        "rope": {},
        "qk_norm": False,
        "attention_bias": False,
    }
    return TargetInfo(**values | changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_of_the_paper(name):
    """LookaheadKV, Table 1: all linears but the last layer's o and MLP, rank 8, 32 tokens."""
    shape, millions, percent, billions = PUBLISHED[name]
    with torch.device("meta"):
        module = LookaheadKV(Config(), info_of(*shape))
    total = sum(tensor.numel() for tensor in module.state_dict().values())
    assert round(total / 1e6, 2) == millions
    assert round(100 * total / billions / 1e9, 2) == percent
    held = 8 * (shape[4] + shape[2] * shape[3])  # v of the last layer: there, but nothing depends on it
    assert sum(p.numel() for p in module.parameters()) == total - held


def test_the_last_layer_trains_queries_and_keys_alone(three_layers):
    module = LookaheadKV(Config(), three_layers().info)
    trained = {name for name, _ in module.named_parameters() if name.startswith("layers.2.")}
    assert trained == {f"layers.2.self_attn.{x}_proj.lora_{half}.weight" for x in "qk" for half in "AB"}
    assert len([name for name, _ in module.named_parameters() if name.startswith("layers.1.")]) == 14


@pytest.mark.parametrize(
    ("targets", "linears"),
    [("all", "q k v o gate up down"), ("qv", "q v"), ("none", ""), (["up", "q"], "q up")],
)
def test_lora_targets(three_layers, targets, linears):
    module = LookaheadKV(Config(lora_targets=targets), three_layers().info)
    found = {name.split(".")[3] for name in module.state_dict() if name.startswith("layers.0.")}
    assert found == {f"{word}_proj" for word in linears.split()}


def test_fresh_modules_begin_where_the_target_is(three_layers):
    target, config = three_layers(dtype=torch.float32), Config()
    module = methods.get("lookaheadkv").build(config, target.info)
    methods.get("lookaheadkv").objective(module, target, config)
    std = target.model.model.embed_tokens.weight.std()
    assert float(module.lookahead_embeddings.detach().std() / std) == pytest.approx(1, abs=0.1)
    state = module.state_dict()
    for name, tensor in state.items():
        if "lora_B" in name:
            assert not tensor.any()
        if "lora_A" in name:  # Kaiming-uniform, as PEFT
            assert tensor.abs().max() <= 1 / math.sqrt(tensor.shape[1]) and tensor.std() > 0
    again = methods.get("lookaheadkv").build(config, target.info)
    again.load_state_dict(state)
    methods.get("lookaheadkv").objective(again, target, config)
    assert torch.equal(again.lookahead_embeddings, module.lookahead_embeddings)
    fixed = methods.get("lookaheadkv").build(Config(init_std=0.5), target.info)
    methods.get("lookaheadkv").objective(fixed, target, Config(init_std=0.5))
    assert float(fixed.lookahead_embeddings.detach().std()) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_lookahead": 0}, "method.n_lookahead=0; allowed: a whole number, 1 or more"),
        ({"lora_rank": 0}, "method.lora_rank=0"),
        ({"pool_kernel": 4}, "method.pool_kernel=4; allowed: 1 (off), 3"),
        ({"lora_alpha": 0.0}, "method.lora_alpha=0.0; allowed: a number, above 0"),
        ({"lora_targets": "q"}, "method.lora_targets=q; allowed: all, qv, none, or a list of q, k"),
        ({"lora_targets": ["q", "embed"]}, "method.lora_targets"),
        ({"reduction": "sum"}, "method.reduction=sum; allowed: mean, max"),
        ({"budgets": [64, 0]}, "method.budgets"),
        ({"budget_weight": -1.0}, "method.budget_weight"),
        ({"response": "prompt"}, "method.response=prompt; allowed: answer, question_answer"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(ConfigError) as error:
        Config(**changes)
    assert message in str(error.value)


def test_targets_that_cannot_be(three_layers):
    with pytest.raises(TargetMismatchError, match=r"target\.path"):
        methods.get("lookaheadkv").build(Config(), None)
    for family in ("gpt_oss", "phi3", "ministral3"):  # sinks, joined linears, queries scaled by position
        with pytest.raises(TargetMismatchError, match=f"family {family}; LookaheadKV is built for: llama, "):
            LookaheadKV(Config(), info_of(2, 4, 2, 16, 48, 80, family=family))
    near = tuple(LayerInfo(2, 16, 16, kv_of=index, window=8) for index in range(2))
    with pytest.raises(TargetMismatchError, match="2 of 2 layers"):
        LookaheadKV(Config(), replace(info_of(2, 4, 2, 16, 48, 80, family="mistral"), layers=near))
    experts = info_of(2, 4, 2, 16, 48, 80, family="qwen3_moe")
    with pytest.raises(TargetMismatchError, match=r"pass method.lora_targets=\[q,k,v,o\]"):
        LookaheadKV(Config(), experts)
    assert LookaheadKV(Config(lora_targets=["q", "k", "v", "o"]), experts).adapters(torch.float32)
