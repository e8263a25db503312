"""Keys of a `config.json` that another tool wrote, read with the kind of value that each must have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtrain.errors import ArtifactError


@dataclass(frozen=True)
class Keys:
    """A mapping of keys; a key whose value is null counts as missing, unless a method says otherwise.

    Args:
        path: the file, for messages.
        values: the mapping.
        before: what stands before each key in messages, such as `rope_parameters.`.

    Every method raises `ArtifactError` for a value of another kind, with the file, the key and the value.
    """

    path: Path
    values: Mapping[str, Any]
    before: str = ""

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return self.values.get(key) is not None

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; without a default it must be there."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        return self._whole(key, value, least)

    def number(self, key: str, default: float) -> float:
        """A number above 0; null is refused."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def switch(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = default if not self.has(key) else self.values[key]
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        value = default if not self.has(key) else self.values[key]
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty where the key is missing."""
        value = self.values[key] if self.has(key) else []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(key, "a list of strings")
        return value

    def wholes(self, key: str, *, least: int) -> list[int] | None:
        """A list of whole numbers, at least one; None where the key is missing."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, list) or not value:
            raise self.wrong(key, f"a list of whole numbers from {least}")
        return [self._whole(key, one, least) for one in value]

    def part(self, key: str) -> Keys:
        """A mapping within this one; empty where the key is missing."""
        value = self.values[key] if self.has(key) else {}
        if not isinstance(value, dict):
            raise self.wrong(key, "a mapping of keys")
        return Keys(self.path, value, f"{self.before}{key}.")

    def wrong(self, key: str, allowed: str) -> ArtifactError:
        """The error of a key."""
        shown = json.dumps(self.values[key]) if key in self.values else "nothing"
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return self.error(f"{self.before}{key}={shown}; allowed: {allowed}")

    def error(self, what: str) -> ArtifactError:
        """The error of the file."""
        return ArtifactError(f"{self.path}: {what}")

    def _whole(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"whole numbers from {least}")
        return value
