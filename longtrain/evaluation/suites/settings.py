"""Reads the keys of a suite's settings: each getter says what the key must be, and errors name it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longtrain.errors import ConfigError
from longtrain.settings import parse_tokens


class Settings:
    """The `suite` group of a configuration as plain values.

    Every getter raises ConfigError if the key is missing or its value is of another kind or out of range.

    Args:
        values: the group; its `name` is used in messages.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.suite = str(values.get("name", "suite"))

    def get(self, key: str) -> Any:
        """The value as it is."""
        if key not in self.values:
            raise ConfigError(
                f"suite {self.suite} needs the key suite.{key}, it has {', '.join(self.values) or 'none'}; "
                "start from its file in conf/suite"
            )
        return self.values[key]

    def integer(self, key: str, *, least: int = 1, most: int | None = None) -> int:
        """A whole number from `least` to `most`."""
        return self._integer(key, self.get(key), least, most)

    def optional_integer(self, key: str, *, least: int = 1, most: int | None = None) -> int | None:
        """The same, or null."""
        return None if self.get(key) is None else self.integer(key, least=least, most=most)

    def integers(self, key: str, *, least: int = 1, most: int | None = None) -> tuple[int, ...]:
        """One or more different whole numbers, in the given order."""
        found = tuple(self._integer(key, value, least, most) for value in self._list(key))
        return self._different(key, found)

    def number(self, key: str, *, least: float, most: float) -> float:
        """A number from `least` to `most`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(key, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def optional_flag(self, key: str) -> bool | None:
        """True, false or null."""
        return None if self.get(key) is None else self.flag(key)

    def text(self, key: str) -> str:
        """A text that is not empty."""
        value = self.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, value, "text that is not empty")
        return value

    def optional_text(self, key: str) -> str | None:
        """The same, or null."""
        return None if self.get(key) is None else self.text(key)

    def choice(self, key: str, allowed: Sequence[str]) -> str:
        """One of some words."""
        value = self.get(key)
        if value not in allowed:
            raise self.wrong(key, value, f"one of {', '.join(allowed)}")
        return str(value)

    def names(self, key: str, allowed: Sequence[str]) -> tuple[str, ...]:
        """Different ones of some names, in the order of `allowed`; an empty list or null stands for all."""
        value = self.get(key)
        if value is None or value == []:
            return tuple(allowed)
        found = [str(name) for name in self._list(key)]
        unknown = [name for name in found if name not in allowed]
        if unknown:
            raise self.wrong(key, found, f"each once of {', '.join(allowed)} (unknown: {unknown[0]})")
        self._different(key, tuple(found))
        return tuple(name for name in allowed if name in found)

    def tokens(self, key: str) -> tuple[int, ...]:
        """One or more different token counts in growing order; 4096 and "4k" are the same."""
        values = self._list(key)
        try:
            found = tuple(parse_tokens(value) for value in values)
        except ConfigError as error:
            raise ConfigError(f"suite.{key}: {error}") from None
        return tuple(sorted(self._different(key, found)))

    def wrong(self, key: str, value: Any, allowed: str) -> ConfigError:
        """The error of a value that a key cannot have."""
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        return ConfigError(f"suite.{key}={shown}; allowed: {allowed}")

    def _integer(self, key: str, value: Any, least: int, most: int | None) -> int:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not good or (most is not None and value > most):
            bounds = f"{least} or more" if most is None else f"{least} to {most}"
            raise self.wrong(key, value, f"whole numbers, {bounds}")
        return int(value)

    def _list(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list | tuple) or not value:
            raise self.wrong(key, value, "a list that is not empty")
        return list(value)

    def _different(self, key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) < len(values):
            raise self.wrong(key, list(values), "a list without repetitions")
        return values
