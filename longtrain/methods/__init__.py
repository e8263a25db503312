"""One folder per method; finding the folder is the registration."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from longtrain.methods.spec import MethodSpec


GONE = frozenset({"views"})
"""Settings of earlier versions that training alone read."""


def names() -> tuple[str, ...]:
    """Every method there is: the folders with a `config.py` in any place of this package's path.

    A method that lies elsewhere is registered by adding the folder around it to `longtrain.methods.__path__`.
    Nothing is imported.
    """
    files = (file for place in __path__ for file in Path(place).glob("*/config.py"))
    return tuple(sorted({file.parent.name for file in files}))


def without_gone(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A method's settings as an artifact or a run stored them, without those that are gone."""
    return {
        key: without_gone(value) if isinstance(value, Mapping) else value
        for key, value in stored.items()
        if key not in GONE
    }


def config_class(name: str) -> type:
    """A method's hyperparameter dataclass, without importing torch.

    Raises:
        ConfigError: no such method.
    """
    if name not in names():
        raise ConfigError(f"unknown method '{name}'; known: {', '.join(names())}")
    return importlib.import_module(f"longtrain.methods.{name}.config").Config


def formats() -> dict[str, tuple[str, ...]]:
    """Method -> the formats of other tools that its modules are exported in, without importing torch."""
    modules = {name: importlib.import_module(f"longtrain.methods.{name}.config") for name in names()}
    return {name: module.FORMATS for name, module in modules.items() if hasattr(module, "FORMATS")}


def trains_target(name: str) -> bool:
    """Whether a method makes a target, and no module for one; imports no torch."""
    config_class(name)
    return bool(getattr(importlib.import_module(f"longtrain.methods.{name}.config"), "TRAINS_TARGET", False))


def get(name: str) -> MethodSpec:
    """A method's `SPEC`.

    Raises:
        ConfigError: no such method.
    """
    config_class(name)
    return importlib.import_module(f"longtrain.methods.{name}.spec").SPEC
