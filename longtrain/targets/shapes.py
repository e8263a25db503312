"""Named shapes for random targets: micro ones for tests, published ones for benchmarks."""

from __future__ import annotations

from typing import Any

from longtrain.errors import ConfigError

_MICRO = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _LLAMA3_ROPE,
    "tie_word_embeddings": False,
    "eos_token_id": [128001, 128008, 128009],
    "bos_token_id": 128000,
}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama_micro": {**_MICRO, "model_type": "llama"},
    "qwen2_micro": {**_MICRO, "model_type": "qwen2", "use_sliding_window": False},
    "qwen3_micro": {**_MICRO, "model_type": "qwen3", "head_dim": 32, "use_sliding_window": False},
    "mistral_micro": {**_MICRO, "model_type": "mistral", "sliding_window": None},
    "gemma3_micro": {
        **_MICRO,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "smollm2_135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    "llama31_8b": _LLAMA3,
    "llama33_70b": {
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama2_7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    "llama32_1b": {
        **_LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "qwen3_8b": _QWEN3,
    "qwen3_30b_a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
        "pad_token_id": 199999,
    },
}
"""The config.json of Llama-3.1-8B, Llama-3.3-70B, Llama-2-7B, Llama-3.2-1B (meta-llama), Qwen3-8B,
Qwen3-30B-A3B, and gpt-oss-20b (openai)."""


def shape_config(shape: str | dict[str, Any]) -> Any:
    """Build a transformers config.

    Args:
        shape: a name of `SHAPES`, or config keys with `model_type`.

    Raises:
        ConfigError: no such name, or no `model_type`.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ConfigError(f"unknown shape '{shape}'; known: {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    if "model_type" not in shape:
        raise ConfigError(f"a shape needs model_type; got the keys {', '.join(shape) or '(none)'}")
    from transformers import AutoConfig

    return AutoConfig.for_model(**shape)
