"""Which methods are trained together, with their own settings. Imports no torch.

A member is named by its method, so there are never two of one kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

from longtrain import methods
from longtrain.errors import ConfigError, LongtrainError
from longtrain.settings import Positive, check, made_by, read

NAMES = tuple(sorted(file.parent.name for file in Path(__file__).parent.parent.glob("*/modules.py")))
"""The methods of this package with a module that is trained against a target."""

Members: Any = make_dataclass(
    "Members",
    [
        # Optional, since the annotation is made of a class that is only known here.
        (name, Optional[methods.config_class(name)], field(default_factory=methods.config_class(name)))  # noqa: UP045
        for name in NAMES
    ],
)
"""The settings of each member; None: it is left out."""


def _members(value: Any) -> Any:
    """Settings as typed, or as made in Python, as `Members`."""
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if not isinstance(value, Mapping):
        raise ConfigError(f"method.members={value}; allowed: a mapping of {', '.join(NAMES)} to their settings")
    if unknown := [name for name in value if name not in NAMES]:
        raise ConfigError(
            f"method.members.{unknown[0]}: no method of this name has a module to train; known: {', '.join(NAMES)}"
        )
    return Members(**{name: _settings(name, value.get(name)) for name in NAMES})


def _settings(name: str, value: Any) -> Any:
    """A member's settings; a member that is not named is left out."""
    kind = methods.config_class(name)
    if value is None or isinstance(value, kind):
        return value
    with member_keys(name):
        return read(kind, value, f"method.members.{name}")


@contextmanager
def member_keys(name: str) -> Iterator[None]:
    """Errors of a member name its keys as they are typed: `method.members.NAME.KEY` for `method.KEY`."""
    try:
        yield
    except LongtrainError as error:
        raise type(error)(re.sub(r"\bmethod\.(?!members\b)", f"method.members.{name}.", str(error))) from error


@dataclass
class Config:
    """Methods that are trained together (ours; no paper)."""

    members: Annotated[Members, made_by(_members)] = field(
        default_factory=Members
    )  # name of a method -> its settings; null: it is left out
    lr_scales: dict[str, Positive] = field(default_factory=dict)  # name of a member -> factor on optim.lr; 1 where
    # it is not named

    def __post_init__(self) -> None:
        check(self, "method")
        chosen = self.chosen()
        if not chosen:
            raise ConfigError(f"method.members leaves out every method; keep one or more of: {', '.join(NAMES)}")
        if unknown := [name for name in self.lr_scales if name not in chosen]:
            raise ConfigError(
                f"method.lr_scales.{unknown[0]}: no such member; method.members has {', '.join(chosen)}"
            )
        self._check_offsets()

    def chosen(self) -> dict[str, Any]:
        """The members' settings by their names."""
        found = {name: getattr(self.members, name) for name in NAMES}
        return {name: settings for name, settings in found.items() if settings is not None}

    def _check_offsets(self) -> None:
        """Refuse members that read a row at different positions, since one pass has one set of them."""
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
                    f"method.members: {first[0]} has {key}={first[1].get(key)} and {name} {mine.get(key)}, and "
                    f"one pass of the target has one set of positions; pass the same {', '.join(keys)} for all"
                )
