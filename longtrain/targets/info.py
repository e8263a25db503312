"""Facts about a target that modules depend on, and the check that a target is supported.

Shapes: L layers, H query heads, G KV heads, D head dim, E hidden dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from longtrain.errors import TargetMismatchError

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""`model_type`s whose attention is full, causal and routed through transformers' attention interface."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose angles do not change with the length."""
_ROPE_KEYS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
    },
}
"""Keys that each rotary type reads besides `rope_theta`, with the default of each."""
_SUPPORTED = f"supported: {', '.join(FAMILIES)} without sliding window"


@dataclass(frozen=True)
class TargetInfo:
    """Facts about a frozen target that modules are built from and artifacts are checked against.

    `name` and `weights_hash` identify the target; every other field affects a module's arithmetic.
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
        """Return the fields as plain JSON values."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Rebuild from `to_json`'s output; unknown keys are stored in `extra`."""
        known = {f.name for f in fields(cls)}
        data = {key: value for key, value in values.items() if key in known}
        data["eos_ids"] = tuple(data.get("eos_ids", ()))
        data["extra"] = {**data.get("extra", {}), **{k: v for k, v in values.items() if k not in known}}
        return cls(**data)

    @property
    def source(self) -> dict[str, str]:
        """Identity of the weights (`targets.at_hand.source_of`); empty if their files do not state it."""
        found = self.extra.get("source")
        return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}

    def check(self, other: TargetInfo) -> None:
        """Refuse a target that differs from the one a module was trained for.

        Args:
            other: the target in use; `self` is the one in the artifact.

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
            if key == "rope":
                mine, theirs = rope_values(mine), rope_values(theirs)
            if mine != theirs:
                raise TargetMismatchError(
                    f"artifact was trained for {self.name} ({key}={mine}), the target at hand is "
                    f"{other.name} ({key}={theirs}); pass the target it was trained for, "
                    f"e.g. target.path={self.name}"
                )


def source_line(source: Mapping[str, str]) -> str:
    """Return a target's source (`TargetInfo.source`) in words; empty if unknown."""
    if "gguf" in source:
        told = (source["gguf"], source.get("quantisation"), f"SHA-256 {source.get('sha256')}")
        return f"GGUF {', '.join(map(str, told))}"
    return f"Hub revision {source['hub_revision']}" if "hub_revision" in source else ""


@dataclass(frozen=True)
class TargetSketch(TargetInfo):
    """A target's facts in another tool's folder; only these are compared.

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


def rope_values(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise rotary parameters, so that equal angles give equal values whatever their spelling.

    Args:
        rope: `rope_parameters` of transformers, or as another tool or version spells them.

    Returns:
        `rope_type` and its numbers, sorted by name, without defaults.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    usual = {"rope_theta": None, "partial_rotary_factor": 1, **_ROPE_KEYS.get(kind, dict.fromkeys(rope))}
    found: dict[str, Any] = {"rope_type": kind}
    for key, value in rope.items():
        if key in ("rope_type", "type") or key not in usual or value is None or value == usual[key]:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = key == "original_max_position_embeddings"
        found[key] = (int(value) if whole else float(value)) if number else value
    return dict(sorted(found.items()))


def check_supported(config: Any, where: str, *, max_positions: int | None = None) -> None:
    """Refuse a target whose attention the hook would get wrong.

    Args:
        config: a transformers config.
        where: the target's name, for the message.
        max_positions: the context in tokens, if it differs from the config's.

    Raises:
        TargetMismatchError: sliding windows, latent attention (MLA), sinks, softcapping, an encoder, a rotary
            type whose angles change with the length, or a family that is not tested.
    """
    context: int = max_positions or getattr(config, "max_position_embeddings", None) or 0
    reason = _reason(config, context)
    if reason:
        raise TargetMismatchError(f"target {where} ({config.model_type}) {reason}; {_SUPPORTED}")


def _reason(config: Any, context: int) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model, not a decoder"
    if getattr(config, "kv_lora_rank", None):
        return f"has latent attention (MLA, kv_lora_rank={config.kv_lora_rank})"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            return f"softcaps its logits ({key}={getattr(config, key)})"
    if config.model_type.startswith("gpt_oss"):
        return "has attention sinks"
    if window := _window(config, context):
        within = f", which target.max_positions={window} stays within" if window > 1 else ""
        return f"has sliding-window attention (window {window}, context {context}){within}"
    if config.model_type not in FAMILIES:
        return "is of a family that is not supported"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        return f"has rotary embeddings of type '{kind}' (allowed: {', '.join(ROPE_TYPES)})"
    if rope.get("partial_rotary_factor") not in (None, 1):
        return f"rotates a part of each head (partial_rotary_factor={rope['partial_rotary_factor']})"
    return ""


def _window(config: Any, context: int) -> int:
    """Return the size of the sliding window, 0 if there is none or it spans the whole context."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any(kind != "full_attention" for kind in kinds):
        return 0
    if kinds is not None and not window:
        return 1
    return window if window and window < context else 0
