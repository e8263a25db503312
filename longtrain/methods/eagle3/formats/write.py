"""Writes a draft as a folder of either format, and refuses settings that engines would silently ignore.

Source: the loaders of speculators 0.9.0, vLLM 0.32 and 0.33 and SGLang 0.5.23, read and (but for SGLang) run.

Shapes: E hidden dim, K tokens of the draft's vocabulary, V of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import longtrain
from longtrain.errors import ConfigError
from longtrain.methods.draft_folders import (
    SPECULATORS_VERSION,
    TRAINER,
    layer_keys,
    speculators_config,
)
from longtrain.methods.eagle3.config import Config, draft_vocab, layers_of
from longtrain.methods.eagle3.formats.names import FLAT, SPECULATORS, SPECULATORS_CLASS, outside
from longtrain.methods.vocabulary import IDS, vocabulary_map

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo

Json = dict[str, Any]


def check_heads(config: Config, info: TargetInfo) -> None:
    """Refuse query heads that do not divide the hidden size, as transformers' config in engines requires.

    Raises:
        ConfigError: the heads do not divide the hidden size.
    """
    heads = config.n_heads or info.n_heads
    if info.hidden_size % heads:
        raise ConfigError(
            f"method.n_heads={heads} does not divide the hidden size of target {info.name}, "
            f"{info.hidden_size}, and no engine loads such a draft; pass a divisor (head_dim may be any size)"
        )


def refuse(form: str, config: Config, info: TargetInfo | None) -> None:
    """Refuse settings that engines reading a format would silently ignore (`Formats.refuse`).

    Raises:
        ConfigError: the format cannot express the draft's settings.
    """
    if config.sinks:
        raise ConfigError(
            f"format={form}: no engine keeps the first tokens beside an EAGLE-3 draft's window (method.sinks="
            f"{config.sinks}; vLLM 0.33 has no key for them, SGLang 0.5.23 ignores --speculative-draft-sink-"
            "size here); train with method.sinks=0, or serve it with longtrain"
        )
    if info is not None:
        check_heads(config, info)
    if form != FLAT:
        return
    for key, why in (
        ("attention_bias", "builds q, k and v without biases"),
        ("norm_before_residual", "begins the residual with the feature as it is"),
        ("qk_norm", "has no norms on heads"),
        ("own_embeddings", "takes the target's embeddings"),
    ):
        if getattr(config, key):
            raise ConfigError(
                f"format=flat: SGLang {why} and would drop method.{key}=true silently; use "
                "format=speculators "
                f"and vLLM, or train with method.{key}=false"
            )
    if info is not None and (last := layers_of(config, info.n_layers)[-1]) == info.n_layers - 1:
        raise ConfigError(
            f"format=flat: SGLang never captures the output of the target's last layer, and method.layers "
            f"reads it ({last} of 0..{info.n_layers - 1}); use format=speculators and vLLM, or train with "
            "method.layers below it"
        )


def folder_tensors(
    tensors: Mapping[str, Tensor], config: Config, *, form: str, vocab_size: int, embed_VE: Tensor | None
) -> dict[str, Tensor]:
    """Return a module's tensors under a format's names.

    Args:
        tensors: the module's state, by name.
        config: hyperparameters.
        form: the format.
        vocab_size: V.
        embed_VE: the embeddings, which a speculators folder must contain.
    """
    found = {outside(name, form): tensor for name, tensor in tensors.items() if name != IDS}
    if len(tensors[IDS]) != vocab_size:
        found |= vocabulary_map(tensors[IDS], vocab_size)
    if form == SPECULATORS and embed_VE is not None:
        found["embed_tokens.weight"] = embed_VE.to(tensors["fc.weight"].dtype)
    if form == SPECULATORS and config.attention_bias:  # these loaders expect a bias on o_proj too
        name = outside("self_attn.o_proj.weight", form)
        found[name.replace("weight", "bias")] = torch.zeros_like(found[name][:, 0])
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def folder_config(
    config: Config, info: TargetInfo, *, form: str, dtype: str, trained_tokens: int | None, drafted: int
) -> Json:
    """Return a format's `config.json`.

    Args:
        config: hyperparameters.
        info: the target.
        form: the format.
        dtype: dtype of the tensors, e.g. `bfloat16`.
        trained_tokens: tokens of the longest training document; None: unknown.
        drafted: default length of a server's drafted chain.
    """
    inputs = [layer + 1 for layer in layers_of(config, info.n_layers)]
    norms = {key: getattr(config, key) for key in ("norm_before_fc", "fc_norm", "norm_output")}
    own: Json = {"trained_by": TRAINER, "longtrain": longtrain.__version__}
    own |= {} if trained_tokens is None else {"trained_max_tokens": trained_tokens}
    layer = _layer_config(config, info, positions=max(trained_tokens or 0, info.max_positions), inputs=inputs)
    if form == FLAT:
        # SpecForge's class (0.2.0) reads false as a head without a norm; where it is missing, all agree
        norms = {key: value for key, value in norms.items() if value or key != "norm_output"}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            "draft_vocab_size": draft_vocab(config, info.vocab_size),
            "norm_before_residual": config.norm_before_residual,
            **norms,
            "eagle_aux_hidden_state_layer_ids": inputs,
            "dtype": dtype,
            "torch_dtype": dtype,
            **own,
        }
    return {
        "architectures": [SPECULATORS_CLASS],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": {**layer, "model_type": "qwen3" if config.qk_norm else "llama"},
        "draft_vocab_size": draft_vocab(config, info.vocab_size),
        "norm_before_residual": config.norm_before_residual,
        **norms,
        "embed_requires_grad": config.own_embeddings,
        "eagle_aux_hidden_state_layer_ids": inputs,
        "speculators_config": speculators_config("eagle3", info, drafted),
        "tie_word_embeddings": False,
        "dtype": dtype,
        **own,
    }


def _layer_config(config: Config, info: TargetInfo, *, positions: int, inputs: list[int]) -> Json:
    """Return transformers' keys that describe the layer, with both spellings of RoPE and of the layer ids."""
    made: Json = {
        "model_type": "llama",
        **layer_keys(config, info, positions=positions),
        "num_hidden_layers": 1,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "num_aux_hidden_states": len(inputs),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in inputs],
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
    }
    if config.window:
        made |= {"sliding_window": config.window + 1, "use_sliding_window": True}
        made["layer_types"] = ["sliding_attention"]
    return made
