"""Checks that methods share: a missing target, a module of another size, unknown inference keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from longtrain.decoding.evict import Budget
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.spec import fitted

if TYPE_CHECKING:
    from torch import nn

    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target

M = TypeVar("M", bound="nn.Module")


def built_for_target(kind: Callable[[Any, TargetInfo], M]) -> Callable[[Any, TargetInfo | None], M]:
    """Return a `MethodSpec.build` that builds a module of this class, and refuses a missing target."""

    def build(config: Any, info: TargetInfo | None) -> M:
        if info is None:
            raise TargetMismatchError(f"{kind.__name__} is built for a target; pass target.path")
        return kind(config, info)

    return build


def trained(kind: type[M], module: nn.Module, target: Target | None) -> tuple[M, Target]:
    """Return the module and the target of an objective.

    Raises:
        TargetMismatchError: there is no target.
    """
    if target is None:
        raise TargetMismatchError(f"{kind.__name__} is trained against a target; pass target.path")
    assert isinstance(module, kind)
    return module, target


def running(kind: type[M], module: nn.Module, target: Target) -> M:
    """Fit a module to the target, for an engine."""
    assert isinstance(module, kind)
    return fitted(module, target)


def check_sizes(what: str, own: tuple[int, ...], needed: tuple[int, ...], info: TargetInfo) -> None:
    """Refuse a module that was built for a target of other sizes; `what` describes it and its sizes.

    Raises:
        TargetMismatchError: the sizes differ.
    """
    if own != needed:
        raise TargetMismatchError(f"{what} = {own}; target {info.name} asks for {needed}")


def given_keys(method: str, keys: Mapping[str, Any], known: Sequence[str] = ()) -> dict[str, Any]:
    """Return the inference keys that have a value, and refuse keys that are not in `known`.

    Raises:
        ConfigError: an unknown key has a value.
    """
    given = {key: value for key, value in keys.items() if value is not None}
    if unknown := sorted(set(given) - {*known}):
        takes = f"has no inference key '{unknown[0]}'; known: {', '.join(known)}"
        raise ConfigError(f"{method} {takes if known else f'takes no inference keys; got: {unknown[0]}'}")
    return given


def eviction_budget(method: str, given: Mapping[str, Any]) -> Budget:
    """Return an evictor's budget from its inference keys.

    Raises:
        ConfigError: no budget is given, or it is not allowed.
    """
    tokens, ratio = given.get("budget_tokens"), given.get("budget_ratio")
    if tokens is None and ratio is None:
        raise ConfigError(
            f"{method} evicts to a budget and was given none; pass evict.budget_tokens=128 or "
            "evict.budget_ratio=0.1 (in Python: attach(target, budget_tokens=128))"
        )
    return Budget(tokens, ratio)
