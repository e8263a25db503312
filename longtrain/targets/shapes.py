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
SHAPES: dict[str, dict[str, Any]] = {
    "llama_micro": {**_MICRO, "model_type": "llama"},
    "qwen2_micro": {**_MICRO, "model_type": "qwen2", "use_sliding_window": False},
    "qwen3_micro": {**_MICRO, "model_type": "qwen3", "head_dim": 32, "use_sliding_window": False},
    "mistral_micro": {**_MICRO, "model_type": "mistral", "sliding_window": None},
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
    "llama31_8b": {
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
    },
    "llama33_70b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _LLAMA3_ROPE,
        "tie_word_embeddings": False,
        "eos_token_id": [128001, 128008, 128009],
        "bos_token_id": 128000,
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
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
        "eos_token_id": [128001, 128008, 128009],
        "bos_token_id": 128000,
    },
    "qwen3_8b": {
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
    },
}
"""The config.json of Llama-3.1-8B, Llama-3.3-70B, Llama-2-7B, Llama-3.2-1B (meta-llama) and Qwen3-8B."""


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
