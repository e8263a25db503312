"""Predicts which tensors of a flat folder SGLang's loader would drop, and which it would leave unset.

SGLang has no CPU wheel, so its loader cannot be run in tests; this module reimplements its rules.

Source: `LlamaForCausalLMEagle3` and its `load_weights`, SGLang 0.5.23 (`sglang/srt/models/llama_eagle3.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from longtrain.methods.eagle3.formats.names import OLD_NORMS
from longtrain.methods.vocabulary import MARKS, OFFSETS

RENAMED = {"midlayer": "layers.0", **OLD_NORMS}
STACKED = {
    ".q_proj": ".qkv_proj",
    ".k_proj": ".qkv_proj",
    ".v_proj": ".qkv_proj",
    ".gate_proj": ".gate_up_proj",
    ".up_proj": ".gate_up_proj",
}


def sglang_problems(config: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Return the differences between a flat folder and what SGLang would run; empty if there are none.

    Args:
        config: the folder's `config.json`.
        names: names of its tensors.
    """
    parameters, wrong = _parameters(config), []
    loaded: set[str] = set()
    for outer in names:
        name = outer
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if OFFSETS in name or MARKS in name or name.endswith("rotary_emb.inv_freq"):
            continue
        part = next((part for part in STACKED if part in name), None)
        found = name if part is None else name.replace(part, STACKED[part])
        found = found if found in parameters else f"model.{found}"
        if found in parameters:
            loaded.add(found + (part or ""))
        else:
            wrong.append(f"SGLang drops {outer} silently")
    for name in sorted(parameters):
        parts = [part for part, whole in STACKED.items() if whole in name] or [""]
        missing = [part for part in parts if name + part not in loaded]
        wrong += [f"SGLang leaves {part.lstrip('.') or name} unset: no tensor has it" for part in missing]
    for key in ("attention_bias", "norm_before_residual"):
        if config.get(key):
            wrong.append(f"SGLang ignores {key}=true")
    if "draft_vocab_size" not in config:
        wrong.append("SGLang needs draft_vocab_size")
    if config.get("target_hidden_size", 0) is None:
        wrong.append("SGLang multiplies target_hidden_size, which is null")
    if config.get("tie_word_embeddings"):
        wrong.append("SGLang takes the embeddings for the head (tie_word_embeddings=true)")
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if config.get("eagle_aux_hidden_state_layer_ids") and not ids:
        wrong.append(
            "SGLang reads its layers from eagle_config.eagle_aux_hidden_state_layer_ids, which is missing"
        )
    return wrong


def _parameters(config: dict[str, Any]) -> set[str]:
    """Return the parameter names of SGLang's module (`embed_tokens` comes from the target)."""
    layer = "model.layers.0."
    names = {"lm_head.weight", "model.fc.weight", "model.norm.weight"}
    names |= {
        f"{layer}{part}.weight"
        for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.qkv_proj")
    }
    names |= {f"{layer}{part}.weight" for part in ("self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")}
    eagle = config.get("eagle_config") or {}
    if eagle.get("norm_before_fc", config.get("norm_before_fc", False)):
        names.add("model.input_norm.weight")
    if config.get("fc_norm") or config.get("use_aux_norm", False):
        ids = eagle.get("eagle_aux_hidden_state_layer_ids")
        levels = config.get("num_aux_hidden_states") or (len(ids) if ids else 3)
        names |= {f"model.fc_norm.{level}.weight" for level in range(levels)}
    return names
