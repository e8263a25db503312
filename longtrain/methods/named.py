"""Parses the name of a policy, method or cache in a configuration, with its options; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longtrain.methods.policies import POLICIES
from longtrain.settings import wrong


@dataclass(frozen=True)
class Named:
    """A policy, method or cache with the options that were typed, and for a policy a label."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    label: str | None = None

    @property
    def words(self) -> str:
        """The part in words: `quantspec draft=false`, or for a policy `adakv(snapkv) window=8`."""
        if self.name not in POLICIES:
            return in_words(self.name, self.options)
        over = f"({self.options['over']})" if "over" in self.options else ""
        words = [f"{key}={value}" for key, value in self.options.items() if key != "over"]
        return self.label or " ".join([f"{self.name}{over}", *words])


def in_words(name: str, options: Mapping[str, Any]) -> str:
    """Return name and options in words, such as `lookaheadkv adaptive=heads`."""
    shown = {True: "true", False: "false", None: "null"}
    return " ".join(
        [name, *(f"{k}={shown.get(v, v) if isinstance(v, bool | None) else v}" for k, v in options.items())]
    )


def named(key: str, value: Any, where: str) -> Named | None:
    """Parse a part: `NAME` or `{name: NAME, option: value}`.

    Args:
        key: kind of part: `policy`, `method` or `cache`.
        value: the typed value; None: there is none.
        where: key of the configuration, for messages.

    Raises:
        ConfigError: it is neither form.
    """
    if value is None:
        return None
    if isinstance(value, Mapping) and "name" in value:
        options = dict(value)
        name, label = str(options.pop("name")), options.pop("label", None) if key == "policy" else None
        return Named(name, options, label)
    if not isinstance(value, str):
        raise wrong(f"{where}: {key}", value, "NAME or {name: NAME, option: value}")
    return Named(value)
