"""Which targets the one attention hook serves exactly, told from the config before any weight is read."""

from __future__ import annotations

from typing import Any

from longtrain.errors import TargetMismatchError

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""`model_type`s whose attention is full, causal and routed through transformers' attention interface."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SUPPORTED = f"supported: {', '.join(FAMILIES)} without sliding window"


def check_supported(config: Any, where: str) -> None:
    """Refuse a target whose attention the hook would get wrong.

    Args:
        config: a transformers config.
        where: the target's name, for the message.

    Raises:
        TargetMismatchError: sliding windows, latent attention (MLA), sinks, softcapping, an encoder, a rotary
            type whose angles change with the length, or a family that is not proven.
    """
    reason = _reason(config)
    if reason:
        raise TargetMismatchError(f"target {where} ({config.model_type}) {reason}; {_SUPPORTED}")


def _reason(config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model, not a decoder"
    if getattr(config, "kv_lora_rank", None):
        return f"has latent attention (MLA, kv_lora_rank={config.kv_lora_rank})"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            return f"softcaps its logits ({key}={getattr(config, key)})"
    if config.model_type.startswith("gpt_oss"):
        return "has attention sinks"
    if window := _window(config):
        return f"has sliding-window attention (window {window})"
    if config.model_type not in FAMILIES:
        return "is of a family that is not supported"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        return f"has rotary embeddings of type '{kind}' (allowed: {', '.join(_ROPE_TYPES)})"
    return ""


def _window(config: Any) -> int:
    """Size of the sliding window in use, 0 if none is (one that spans the whole context is none)."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any(kind != "full_attention" for kind in kinds):
        return 0
    if kinds is not None and not window:
        return 1
    return window if window and window < config.max_position_embeddings else 0
