"""How a system is written in a configuration (`suite.systems`): the one grammar that every job reads.

An entry is the name of a policy or of a method, or a mapping. `{name: NAME, option: value}` is a policy or a
method with options. Otherwise the keys say what is put together: `artifact`, `policy`, `method`, `cache`,
and inference keys of the artifacts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtrain import methods
from longtrain.errors import ConfigError
from longtrain.methods.policies import POLICIES
from longtrain.settings import Count, Counts, Share, Text, convert, read, wrong

Json = dict[str, Any]
KEY = "suite.systems"
ALLOWED = (
    "NAME of a policy or of a method, {name: NAME, option: value}, {artifact: NAME}, "
    "{artifact: [NAME, NAME]}, {artifact: NAME, policy: NAME}, {method: NAME} (one without training, alone "
    "or beside these), {cache: NAME}"
)
PARTS = ("artifact", "policy", "method", "cache")
_EVERYWHERE: dict[str, Any] = {
    "label": Text | None,
    "drafted": Counts,
    "shapes": tuple[tuple[Count, ...], ...],
    "acceptance": Share,
}
"""Keys of every entry -> what each may be."""


@dataclass(frozen=True)
class Named:
    """A policy, method or cache with the options that were typed, and a policy's own label."""

    name: str
    options: Json = field(default_factory=dict)
    label: str | None = None

    @property
    def words(self) -> str:
        """`quantspec draft=false`, or of a policy `adakv(snapkv) window=8`."""
        if self.name not in POLICIES:
            return in_words(self.name, self.options)
        over = f"({self.options['over']})" if "over" in self.options else ""
        words = [f"{key}={value}" for key, value in self.options.items() if key != "over"]
        return self.label or " ".join([f"{self.name}{over}", *words])


@dataclass(frozen=True)
class Entry:
    """One entry of `suite.systems`.

    Args:
        artifacts: names or folders of exported modules.
        policy: an eviction policy.
        method: a method that needs no training, or that is to have random weights.
        cache: a cache by its name.
        options: inference keys of what is attached.
        label: what the system is called; None: by what it is made of.
        shapes: widths of the trees that it drafts; empty: those of the run.
        acceptance: the chance that a drafted token is accepted, where it is given.
    """

    artifacts: tuple[str, ...] = ()
    policy: Named | None = None
    method: Named | None = None
    cache: Named | None = None
    options: Json = field(default_factory=dict)
    label: str | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    acceptance: float | None = None

    @property
    def is_policy(self) -> bool:
        """Whether it is an eviction policy and nothing else."""
        return self.policy is not None and not (self.artifacts or self.method or self.cache)

    def called(self, *, method: str | None = None) -> str:
        """What its systems are called, budget and shape aside.

        Args:
            method: the words for the method, over those that were typed.
        """
        if self.label:
            return self.label
        if self.is_policy:
            assert self.policy is not None
            return self.policy.words
        names = [Path(one).name for one in self.artifacts]
        if self.method is not None:
            names.append(method or self.method.words)
        names += [one.words for one in (self.policy, self.cache) if one is not None]
        return in_words("+".join(names), self.options)

    def config(self) -> Any:
        """The method's settings.

        Raises:
            ConfigError: there is no such method or setting, or a value is not allowed.
        """
        assert self.method is not None
        name = self.method.name
        return read(methods.config_class(name), self.method.options, f"method {name}")


def parse(value: Any) -> Entry:
    """An entry as it was typed.

    Raises:
        ConfigError: it is of no kind that there is, or a key has a value that is not allowed.
    """
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or {"name", *PARTS}.isdisjoint(value):
        raise wrong(f"{KEY}: entry", value, ALLOWED)
    rest = dict(value)
    common = {
        key: convert(rest.pop(key), kind, f"{KEY}: {key}") for key, kind in _EVERYWHERE.items() if key in rest
    }
    drafted = tuple((1,) * count for count in common.pop("drafted", ()))
    common["shapes"] = (*drafted, *common.pop("shapes", ()))
    if "name" in rest:
        return Entry(**_bare(rest), **common)
    listed = rest.pop("artifact", None)
    artifacts = listed if isinstance(listed, list | tuple) else [listed] if listed else []
    parts: Json = {key: _named(key, rest.pop(key, None)) for key in PARTS[1:]}
    return Entry(artifacts=tuple(map(str, artifacts)), options=rest, **parts, **common)


def parse_all(values: Any) -> list[Entry]:
    """The entries of `suite.systems`.

    Raises:
        ConfigError: it is no list, or an entry is wrong.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        raise wrong(KEY, values, "a list, [snapkv,{artifact: NAME}]")
    return [parse(value) for value in values]


def in_words(name: str, options: Mapping[str, Any]) -> str:
    """`lookaheadkv adaptive=heads`."""
    shown = {True: "true", False: "false", None: "null"}
    return " ".join(
        [name, *(f"{k}={shown.get(v, v) if isinstance(v, bool | None) else v}" for k, v in options.items())]
    )


def _bare(rest: Json) -> Json:
    """What `NAME` or `{name: NAME, option: value}` stands for."""
    name = str(rest.pop("name"))
    if name in POLICIES:
        return {"policy": Named(name, rest)}
    if name in methods.names():
        return {"method": Named(name, rest)}
    raise ConfigError(
        f"{KEY} has {name}: unknown eviction policy '{name}'; known: {', '.join(POLICIES)}; methods: "
        f"{', '.join(methods.names())}; other entries: {ALLOWED}"
    )


def _named(key: str, value: Any) -> Named | None:
    """`NAME` or `{name: NAME, option: value}`."""
    if value is None:
        return None
    if isinstance(value, Mapping) and "name" in value:
        options = dict(value)
        name, label = str(options.pop("name")), options.pop("label", None) if key == "policy" else None
        return Named(name, options, label)
    if not isinstance(value, str):
        raise wrong(f"{KEY}: {key}", value, "NAME or {name: NAME, option: value}")
    return Named(value)
