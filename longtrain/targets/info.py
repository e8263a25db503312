"""What a module must know of its target: shapes, rotary base, vocabulary and who it is.

Shapes: L layers, H query heads, G KV heads, D head dim, E hidden dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from longtrain.errors import TargetMismatchError


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
    def from_json(cls, values: dict[str, Any]) -> TargetInfo:
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
