"""Eviction policies without a trained part, found by name and imported on demand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.settings import convert, rules_of

if TYPE_CHECKING:
    from longtrain.decoding.evict import Budget
    from longtrain.methods.policies.base import BasePolicy

POLICIES = {
    "streaming_llm": "attention_free:StreamingLLM",
    "snapkv": "snapkv:SnapKV",
    "pyramidkv": "pyramidkv:PyramidKV",
    "h2o": "h2o:H2O",
    "tova": "snapkv:TOVA",
    "adakv": "adakv:AdaKV",
    "laq": "laq:LAQ",
    "speckv": "speckv:SpecKV",
    "kvzip": "kvzip:KVzip",
    "random": "attention_free:Random",
    "oracle": "oracle:Oracle",
}
"""`evict=NAME` -> file and class."""


def policy_class(name: str) -> type[BasePolicy]:
    """Return a policy's dataclass; its fields beside `budget` are its options.

    Raises:
        ConfigError: no such policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy '{name}'; known: {', '.join(POLICIES)}")
    file, kind = POLICIES[name].split(":")
    found: type[BasePolicy] = getattr(importlib.import_module(f"longtrain.methods.policies.{file}"), kind)
    return found


def get(name: str, *, budget: Budget, **options: Any) -> BasePolicy:
    """Build a policy with a budget.

    Args:
        name: a key of `POLICIES`.
        budget: number of KV entries to keep.
        options: fields of the policy's dataclass.

    Raises:
        ConfigError: no such policy or option, a value of another kind, or a needed option is missing.
    """
    return make(name, budget, options)


def make(name: str, budget: Budget, options: Mapping[str, Any], *, group: str = "evict") -> BasePolicy:
    """Build a policy as `get` does, from typed options that may have any names.

    Args:
        name: a key of `POLICIES`.
        budget: number of KV entries to keep.
        options: fields of the policy's dataclass; not the budget.
        group: prefix of options in messages, as in `evict.window`.

    Raises:
        ConfigError: see `get`.
    """
    kind = policy_class(name)
    known = {field.name: field for field in fields(kind) if field.init and field.name != "budget"}
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ConfigError(
            f"policy '{name}' has no option '{unknown[0]}'; known: {', '.join(known) or 'the budget alone'}"
        )
    for key, field in known.items():
        if field.default is MISSING and field.default_factory is MISSING and key not in options:
            raise ConfigError(f"policy '{name}' needs {group}.{key}; set it")
    hints = rules_of(kind)
    values = {key: convert(value, hints[key], f"{group}.{key}") for key, value in options.items()}
    return kind(budget, **values)
