"""Reads the keys of another tool's `config.json`, and checks the type of each value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from longtrain.errors import ArtifactError, ConfigError
from longtrain.settings import NOT_EMPTY, Count, CountOrZero, Positive, convert, fulfils, in_words

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
