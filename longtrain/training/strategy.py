"""Checks the training strategy and computes the micro-batches of each rank, from the typed settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtrain.errors import ConfigError

PRECISIONS = ("bf16-mixed", "32-true")
"""Values of `trainer.precision` that are allowed under ZeRO."""

INSTEAD = (
    "allowed: trainer=deepspeed_zero1 or trainer=deepspeed_zero2; where the target does not fit on one GPU, "
    "shard it with target.shard=fsdp2"
)


def is_deepspeed(strategy: Any) -> bool:
    """Return True if `trainer.strategy` means DeepSpeed: a name, a mapping with `_target_`, or an object."""
    return "deepspeed" in _name(strategy)


def check(strategy: Any, *, precision: str = "auto", optimizer: str = "adamw") -> None:
    """Refuse settings that cannot train, before anything is built or loaded.

    Args:
        strategy: `trainer.strategy` as it was typed.
        precision: `trainer.precision`.
        optimizer: `optim.name`.

    Raises:
        ConfigError: a strategy that splits the trained module, DeepSpeed by its name alone or by another
            stage than 1 and 2, or with a precision or an optimiser that it does not support.
    """
    name = _name(strategy)
    if any(word in name for word in ("fsdp", "modelparallel", "model_parallel")):
        raise ConfigError(
            f"trainer.strategy={_shown(strategy)} would split the trained module, which is small; use "
            "trainer=ddp, and where the target does not fit on one GPU, target.shard=fsdp2"
        )
    if not is_deepspeed(strategy):
        return
    if isinstance(strategy, str):
        raise ConfigError(f"trainer.strategy={strategy}; {INSTEAD}")
    if isinstance(strategy, Mapping) and "config" not in strategy:
        check_stage(strategy.get("stage"))
    if precision not in ("auto", *PRECISIONS):
        raise ConfigError(
            f"trainer.precision={precision} with DeepSpeed; allowed: {', '.join(PRECISIONS)}, auto"
        )
    if optimizer != "adamw":
        raise ConfigError(
            f"optim.name={optimizer} needs whole matrices, and ZeRO trains flat parts of them; pass "
            "optim.name=adamw, or trainer=ddp"
        )


def check_stage(stage: Any) -> None:
    """Refuse other stages of DeepSpeed than 1 and 2.

    Raises:
        ConfigError: the stage is another; the message names the allowed ones.
    """
    if stage not in (1, 2):
        raise ConfigError(f"DeepSpeed's stage {stage} cannot train here; {INSTEAD}")


def _name(strategy: Any) -> str:
    """Return the name of a strategy; of an object the names of its classes."""
    if isinstance(strategy, Mapping):
        return str(strategy.get("_target_", "")).lower()
    if strategy is None or isinstance(strategy, str):
        return str(strategy).lower()
    return " ".join(one.__name__ for one in type(strategy).__mro__).lower()


def _shown(strategy: Any) -> str:
    return str(strategy.get("_target_")) if isinstance(strategy, Mapping) else str(strategy)
