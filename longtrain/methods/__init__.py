"""The methods, one folder each; a folder with a `config.py` is registered by being there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from longtrain.methods.spec import MethodSpec


GONE = frozenset({"views"})
"""Settings of earlier versions, read only in training, that are ignored in stored artifacts."""


def names() -> tuple[str, ...]:
    """Return the names of all methods: the folders with a `config.py` on this package's path.

    A method outside of the package is registered by adding its parent folder to `longtrain.methods.__path__`.
    Nothing is imported.
    """
    files = (file for place in __path__ for file in Path(place).glob("*/config.py"))
    return tuple(sorted({file.parent.name for file in files}))


def without_gone(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's stored settings without those that no longer exist."""
    return {
        key: without_gone(value) if isinstance(value, Mapping) else value
        for key, value in stored.items()
        if key not in GONE
    }


def config_class(name: str) -> type:
    """Return a method's hyperparameter dataclass, without importing torch.

    Raises:
        ConfigError: no such method.
    """
    if name not in names():
        raise ConfigError(f"unknown method '{name}'; known: {', '.join(names())}")
    return importlib.import_module(f"longtrain.methods.{name}.config").Config


def formats() -> dict[str, tuple[str, ...]]:
    """Return method -> other tools' formats that its modules can be exported in; imports no torch."""
    modules = {name: importlib.import_module(f"longtrain.methods.{name}.config") for name in names()}
    return {name: module.FORMATS for name, module in modules.items() if hasattr(module, "FORMATS")}


def trains_target(name: str) -> bool:
    """Return True if a method trains a target itself rather than a module for one; imports no torch."""
    config_class(name)
    return bool(getattr(importlib.import_module(f"longtrain.methods.{name}.config"), "TRAINS_TARGET", False))


def get(name: str) -> MethodSpec:
    """Return a method's `SPEC`.

    Raises:
        ConfigError: no such method.
    """
    config_class(name)
    return importlib.import_module(f"longtrain.methods.{name}.spec").SPEC
