"""One row for each family of targets beyond the four of `targets.shapes`: what its small configs have."""

from __future__ import annotations

import random
from typing import Any

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3_moe": {
        "num_experts": (8, 5),
        "num_experts_per_tok": (2, 3),
        "moe_intermediate_size": (24, 40),
        "norm_topk_prob": (True, False),
        "decoder_sparse_step": (1, 2),
        "mlp_only_layers": ([], [1]),
        "attention_bias": (False, True),
    },
    "mixtral": {"num_local_experts": (8, 4), "num_experts_per_tok": (2, 1), "sliding_window": (None, 5)},
    "glm4_moe": {
        "n_routed_experts": (8,),
        "num_experts_per_tok": (2, 3),
        "moe_intermediate_size": (24,),
        "n_shared_experts": (1, 2),
        "first_k_dense_replace": (1, 0),
        "n_group": (1, 2),
        "routed_scaling_factor": (1.0, 2.5),
        "use_qk_norm": (False, True),
        "attention_bias": (True, False),
        "partial_rotary_factor": (0.5, 0.25, 1.0),
    },
    "glm4": {"attention_bias": (True, False), "partial_rotary_factor": (0.5, 0.25, 1.0)},
    "seed_oss": {"attention_bias": (True,), "attention_out_bias": (False, True), "mlp_bias": (False, True)},
    "gpt_oss": {
        "num_local_experts": (8, 4),
        "num_experts_per_tok": (2, 3),
        "num_hidden_layers": (3,),
        "layer_types": (["full_attention"] * 3, ["sliding_attention", "full_attention", "sliding_attention"]),
        "sliding_window": (6, 128),
        "rope_parameters": (YARN,),
    },
    "apertus": {"rope_parameters": (LLAMA3,)},
}
"""`model_type` -> the values that each of its own keys takes; the first of each is the usual one."""
EXPERTS = tuple(name for name, keys in FAMILIES.items() if any("experts" in key for key in keys))


def usual(family: str, **other: Any) -> dict[str, Any]:
    """Return the config of a family with the usual values."""
    own = {key: values[0] for key, values in FAMILIES[family].items()}
    return {**BASE, "model_type": family, **own, **other}


def drawn(family: str, seed: int) -> dict[str, Any]:
    """Return a config of a family with values drawn at random."""
    rng = random.Random(f"{family} {seed}")
    kv_heads, kinds = rng.choice((1, 2, 3)), FAMILIES[family]
    return {
        **BASE,
        "model_type": family,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * rng.choice((1, 2, 4)),
        "hidden_size": 24 * rng.choice((1, 2)),
        "head_dim": rng.choice((8, 16)),
        "num_hidden_layers": rng.choice((2, 3)),
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "tie_word_embeddings": rng.random() < 0.3,
        **{key: rng.choice(values) for key, values in kinds.items()},
    }
