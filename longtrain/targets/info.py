"""What a module must know of its target: shapes, rotary base, vocabulary and who it is; and which are served.

Shapes: L layers, H query heads, G KV heads, D head dim, E hidden dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from longtrain.errors import TargetMismatchError

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""`model_type`s whose attention is full, causal and routed through transformers' attention interface."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose angles do not change with the length."""
_SUPPORTED = f"supported: {', '.join(FAMILIES)} without sliding window"


@dataclass(frozen=True)
class TargetInfo:
    """Facts about a frozen target that modules are built from and artifacts are checked against.

    `name` and `weights_hash` say who the target is; every other field is arithmetic that a module relies on.
    """

    name: str
    family: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: dict[str, Any]
    qk_norm: bool
    attention_bias: bool
    hidden_act: str = "silu"
    eos_ids: tuple[int, ...] = ()
    tokenizer_hash: str = ""
    weights_hash: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Rebuild from `to_json`'s output; unknown keys are kept in `extra`."""
        known = {f.name for f in fields(cls)}
        data = {key: value for key, value in values.items() if key in known}
        data["eos_ids"] = tuple(data.get("eos_ids", ()))
        data["extra"] = {**data.get("extra", {}), **{k: v for k, v in values.items() if k not in known}}
        return cls(**data)

    def check(self, other: TargetInfo) -> None:
        """Refuse a target that differs from the one a module was trained for.

        Args:
            other: the target at hand; `self` is the one in the artifact.

        Raises:
            TargetMismatchError: a shape, rotary setting, tokenizer or the weights differ.
        """
        arithmetic = [
            f.name for f in fields(self) if f.name not in {"name", "extra", "max_positions", "eos_ids"}
        ]
        for key in arithmetic:
            mine, theirs = getattr(self, key), getattr(other, key)
            if key in {"tokenizer_hash", "weights_hash"} and not (mine and theirs):
                continue
            if mine != theirs:
                raise TargetMismatchError(
                    f"artifact was trained for {self.name} ({key}={mine}), the target at hand is "
                    f"{other.name} ({key}={theirs}); pass the target it was trained for, "
                    f"e.g. target.path={self.name}"
                )


@dataclass(frozen=True)
class TargetSketch(TargetInfo):
    """What another tool's folder says of the target that its module is for; the rest is not compared.

    `n_layers` is the fewest layers that the target can have; `name` may be empty.
    """

    def check(self, other: TargetInfo) -> None:
        """Refuse a target that the module cannot serve.

        Raises:
            TargetMismatchError: another hidden size or vocabulary, or too few layers.
        """
        for key, what in (("hidden_size", "hidden size"), ("vocab_size", "a vocabulary of")):
            mine, theirs = getattr(self, key), getattr(other, key)
            if mine != theirs:
                raise TargetMismatchError(
                    f"the module is for a target with {what} {mine}, {other.name} has {theirs}; pass the "
                    "target it was trained for, target.path=FOLDER"
                )
        if other.n_layers < self.n_layers:
            raise TargetMismatchError(
                f"the module is for a target of {self.n_layers} layers or more, {other.name} has "
                f"{other.n_layers}; pass the target it was trained for, target.path=FOLDER"
            )


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
    if kind not in ROPE_TYPES:
        return f"has rotary embeddings of type '{kind}' (allowed: {', '.join(ROPE_TYPES)})"
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
