"""The facts of a target that its model's config and modules state, with or without values in them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from longtrain.costs.model import Experts
from longtrain.targets.info import geometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_facts(model: PreTrainedModel, context: int) -> dict[str, Any]:
    """Return the fields of `TargetInfo` that do not depend on names, weights or the tokenizer.

    Args:
        model: a model whose config `check_supported` accepts; it may be on the meta device.
        context: most tokens of a text (`max_positions`).
    """
    config, attention = model.config, model.model.layers[0].self_attn
    rope, layers = geometry(config, attention.head_dim, context)
    experts = Experts.of_keys(config.to_dict())
    act = getattr(config, "hidden_act", None) or config.hidden_activation
    projection = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.q_proj
    return {
        "family": config.model_type,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": attention.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_positions": context,
        "rms_norm_eps": float(str(np.float32(config.rms_norm_eps))),  # norms add it in fp32
        "rope": rope,
        "qk_norm": hasattr(attention, "q_norm"),
        "attention_bias": projection.bias is not None,
        "hidden_act": "silu" if act == "swish" else act,  # two names of one
        "layers": layers,
        "experts": {} if experts is None else asdict(experts),
    }
