"""Settings of methods that are trained together. Imports no torch.

A member has the name of its method, so there are never two of one kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, Optional

from longtrain import methods
from longtrain.errors import ConfigError, LongtrainError
from longtrain.settings import Positive, check, made_by, read, wrong

KINDS = {name: methods.config_class(name) for name in ("longspec", "eagle3", "lookaheadkv", "dspark")}
"""Settings class of each method that can share one pass of the target over a packed sequence."""

BY_NAME = ("dspark",)
"""Members that are trained only where they are named."""

Members: Any = make_dataclass(
    "Members",
    [
        (name, Optional[kind], field(default=None) if name in BY_NAME else field(default_factory=kind))  # noqa: UP045
        for name, kind in KINDS.items()
    ],
)
"""The settings of each member; None: not trained."""

Scales: Any = make_dataclass("Scales", [(name, Positive, 1.0) for name in KINDS])
"""A factor on the learning rate for each member."""


def _members(value: Any) -> Any:
    """Convert settings, typed or built in Python, to `Members`."""
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"method.members={value}; allowed: a mapping of {', '.join(KINDS)} to their settings"
        )
    if unknown := [name for name in value if name not in KINDS]:
        raise ConfigError(
            f"method.members.{unknown[0]}: no method of this name trains a module on a pass of the target "
            f"that others can share; known: {', '.join(KINDS)}"
        )
    return Members(**{name: _settings(name, value.get(name)) for name in KINDS})


def _scales(value: Any) -> Any:
    """Convert typed factors to `Scales`; members that are not named have 1."""
    if isinstance(value, Scales):
        value = vars(value)
    if not isinstance(value, Mapping):
        raise wrong("method.lr_scales", value, f"a mapping of {', '.join(KINDS)} to a factor on optim.lr")
    return read(Scales, value, "method.lr_scales")


def _settings(name: str, value: Any) -> Any:
    """Convert a member's settings."""
    if value is None or isinstance(value, KINDS[name]):
        return value
    if not isinstance(value, Mapping):
        raise wrong(f"method.members.{name}", value, "a mapping of keys to values, or null to leave it out")
    with member_keys(name):
        return read(KINDS[name], value, f"method.members.{name}")


@contextmanager
def member_keys(name: str) -> Iterator[None]:
    """Context manager in which a member's errors name its keys as typed: `method.members.NAME.KEY`."""
    try:
        yield
    except LongtrainError as error:
        raise type(error)(
            re.sub(r"\bmethod\.(?!members\b)", f"method.members.{name}.", str(error))
        ) from error


@dataclass
class Config:
    """Methods that are trained together (longtrain's own; no paper)."""

    members: Annotated[Members, made_by(_members)] = field(
        default_factory=Members
    )  # settings of each method, by its name; {}: LongSpec, EAGLE-3 and LookaheadKV train, each with its own
    # defaults; dspark={} adds DSpark, NAME=null leaves a method out
    lr_scales: Annotated[Scales, made_by(_scales)] = field(default_factory=Scales)  # factor on optim.lr of
    # each method, by its name; {}: 1 for all

    def __post_init__(self) -> None:
        check(self, "method")
        chosen = self.chosen()
        if not chosen:
            raise ConfigError(
                f"method.members leaves out every method; keep one or more of: {', '.join(KINDS)}"
            )
        self._check_offsets()

    def chosen(self) -> dict[str, Any]:
        """Return the settings of the members that are trained, by name."""
        found = {name: getattr(self.members, name) for name in KINDS}
        return {name: settings for name, settings in found.items() if settings is not None}

    def _check_offsets(self) -> None:
        """Refuse members with different position offsets, since they share one pass of the target."""
        keys = ("anchor_offset", "anchors", "offset_max_tokens", "offset_max_doc_tokens")
        first: tuple[str, dict[str, Any]] | None = None
        for name, settings in self.chosen().items():
            moved = getattr(settings, "anchor_offset", False)
            mine = {key: getattr(settings, key) for key in keys} if moved else {"anchor_offset": False}
            if first is None:
                first = name, mine
            elif mine != first[1]:
                key = next(key for key in keys if mine.get(key) != first[1].get(key))
                raise ConfigError(
                    f"method.members: {first[0]} has {key}={first[1].get(key)} and {name} "
                    f"{mine.get(key)}, and one pass of the target has one set of positions; pass the same "
                    f"{', '.join(keys)} for all"
                )
