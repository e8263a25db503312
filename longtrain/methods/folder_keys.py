"""Reads the keys of another tool's `config.json`, and checks each value's type; RoPE in both spellings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from longtrain.errors import ArtifactError, ConfigError, LongtrainError
from longtrain.settings import NOT_EMPTY, Count, CountOrZero, Positive, convert, fulfils, in_words
from longtrain.targets.info import TargetSketch

LAYER_KEY = "transformer_layer_config"

Number = Annotated[Positive, fulfils(math.isfinite)]
LayerInputs = Annotated[list[Count], NOT_EMPTY]
LayerOutputs = Annotated[list[CountOrZero], NOT_EMPTY]


@dataclass(frozen=True)
class Keys:
    """A mapping with typed access.

    Args:
        path: the file, for messages.
        values: the mapping.
        before: prefix of each key in messages, such as `rope_parameters.`.
    """

    path: Path
    values: Mapping[str, Any]
    before: str = ""

    def has(self, key: str) -> bool:
        """Return True if the key has a value other than null."""
        return self.values.get(key) is not None

    def get(self, key: str, kind: Any, default: Any = None, *, null: bool = True) -> Any:
        """Return a key's value, which must have the annotated type (strings are not read as numbers).

        Args:
            key: the key.
            kind: an annotation, see `settings.convert`.
            default: value of a missing key; None: the key is required, unless `kind` allows null.
            null: treat null as missing.

        Raises:
            ArtifactError: the value has another type.
        """
        value = self.values.get(key, default)
        if value is None and null:
            value = default
        try:
            return convert(value, kind, key, strict=True)
        except ConfigError:
            raise self.wrong(key, in_words(kind)) from None

    def part(self, key: str) -> Keys:
        """Return a nested mapping; empty if the key is missing."""
        return Keys(self.path, self.get(key, dict[str, Any], {}), f"{self.before}{key}.")

    def wrong(self, key: str, allowed: str) -> ArtifactError:
        """Build the error of a key's value."""
        shown = json.dumps(self.values[key]) if key in self.values else "nothing"
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return self.error(f"{self.before}{key}={shown}; allowed: {allowed}")

    def error(self, what: str) -> ArtifactError:
        """Build an error about the file."""
        return ArtifactError(f"{self.path}: {what}")


def read_rope(layer: Keys) -> dict[str, Any]:
    """Return `rope_parameters`, from either spelling of the keys.

    Raises:
        ArtifactError: a value of the wrong kind, or the two spellings differ.
    """
    theta = layer.get("rope_theta", Number, 1.0, null=False) if layer.has("rope_theta") else None
    old = dict(layer.part("rope_scaling").values)
    if old.get("type") and not old.get("rope_type"):
        old["rope_type"] = old["type"]
    old.pop("type", None)
    if not layer.has("rope_parameters"):
        return {"rope_type": "default", "rope_theta": theta or 10000.0, **old}
    part = layer.part("rope_parameters")
    new = {
        "rope_type": "default",
        **part.values,
        "rope_theta": part.get("rope_theta", Number, theta or 10000.0, null=False),
    }
    for key, value in {"rope_theta": theta, **old}.items():
        if value is not None and new.get(key, value) != value:
            raise layer.error(
                f"rope_parameters has {key}={new.get(key)}, the older keys have {value}; make them equal"
            )
    return new


def written_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `rope_parameters` in both spellings."""
    kind = rope.get("rope_type", "default")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_parameters": {"rope_type": "default", **rope},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if kind == "default" else {"type": kind, **scaling},
    }


def trainer_of(raw: Keys, trained_by: str | None, known: Sequence[str]) -> str | None:
    """Return who trained a draft: as the user says, or the folder; None: not stated.

    Raises:
        ConfigError: the user names an unknown trainer.
        ArtifactError: the folder does.
    """
    trainer = trained_by or raw.get("trained_by", str, "") or None
    if trainer is not None and trainer not in known:
        allowed = ", ".join(known)
        if trained_by is None:
            raise raw.wrong("trained_by", f"{allowed}; say who trained it, trained_by=NAME")
        raise ConfigError(f"trained_by={trainer} is no trainer that is known; allowed: {allowed}")
    return trainer


def described_layer(raw: Keys, nested: bool) -> Keys:
    """Return the keys that describe the layers: of a speculators folder a part of it, else the whole.

    Raises:
        ArtifactError: there is no such part.
    """
    if nested and not raw.has(LAYER_KEY):
        raise raw.wrong(LAYER_KEY, "a mapping; copy the folder again")
    return raw.part(LAYER_KEY) if nested else raw


def layer_sizes(raw: Keys, layer: Keys) -> dict[str, Any]:
    """Return the hyperparameters that describe a layer's shape, by name.

    Raises:
        ArtifactError: a key is missing or of another kind, the target's hidden size is another one, or the
            activation is not SiLU.
    """
    hidden, heads = layer.get("hidden_size", Count), layer.get("num_attention_heads", Count)
    target_size = raw.get("target_hidden_size", Count, hidden)
    if target_size != hidden:
        raise raw.error(f"its hidden size is {hidden}, its target's {target_size}; allowed: the same")
    if layer.get("hidden_act", str, "silu") not in ("silu", "swish"):
        raise layer.wrong("hidden_act", "silu")
    head_dim = layer.get("head_dim", Count, max(1, hidden // heads))
    if head_dim % 2:
        raise layer.error(f"its heads have {head_dim} dims; allowed: an even number (head_dim)")
    return {
        "intermediate_size": layer.get("intermediate_size", Count),
        "n_heads": heads,
        "n_kv_heads": layer.get("num_key_value_heads", Count, heads),
        "head_dim": head_dim,
        "rms_norm_eps": layer.get("rms_norm_eps", Number, 1e-6, null=False),
        "rope": read_rope(layer),
    }


def sketch_of(
    raw: Keys, layer: Keys, config: Any, *, n_layers: int, qk_norm: bool, bias: bool, positions: int
) -> TargetSketch:
    """Return the target's sizes as stated in a folder: of a target of `n_layers` or more."""
    return TargetSketch(
        name=raw.part("speculators_config").part("verifier").get("name_or_path", str, ""),
        family="llama",
        n_layers=n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        hidden_size=layer.get("hidden_size", Count),
        intermediate_size=config.intermediate_size,
        vocab_size=layer.get("vocab_size", Count),
        max_positions=layer.get("max_position_embeddings", Count, positions),
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope or {},
        qk_norm=qk_norm,
        attention_bias=bias,
        hidden_act=layer.get("hidden_act", str, "silu"),
    )


@contextmanager
def building(raw: Keys) -> Iterator[None]:
    """Turn errors of building what a folder describes into one about the folder.

    Raises:
        ArtifactError: what is described cannot be built.
    """
    try:
        yield
    except ArtifactError:
        raise
    except (LongtrainError, KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise raw.error(f"describes no draft that can be built: {said}; copy it again") from None
