"""One way of running the target: how it is written in a configuration, and what it is once it is made.

`suite.systems` is the one grammar that every job reads. An entry is the name of a policy or of a method, or a
mapping. `{name: NAME, option: value}` is a policy or a method with options. Otherwise the keys say what is
put together: `artifact`, `policy`, `method`, `cache`, and inference keys of the artifacts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtrain import methods
from longtrain.decoding.engine import PLAIN
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.methods.named import Named, in_words, named
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
        return read(methods.config_class(self.method.name), self.method.options, "method")


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
    parts: Json = {key: named(key, rest.pop(key, None), KEY) for key in PARTS[1:]}
    return Entry(artifacts=tuple(map(str, artifacts)), options=rest, **parts, **common)


def parse_all(values: Any) -> list[Entry]:
    """The entries of `suite.systems`.

    Raises:
        ConfigError: it is no list, or an entry is wrong.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        raise wrong(KEY, values, "a list, [snapkv,{artifact: NAME}]")
    return [parse(value) for value in values]


def check_methods(entries: Iterable[Entry], key: str = KEY) -> None:
    """Refuse wrong settings of the entries' methods, by the key that they were typed under.

    Raises:
        ConfigError: there is no such method or setting, or a value is not allowed.
    """
    for entry in entries:
        if entry.method is not None:
            with as_typed(entry, key):
                entry.config()


@contextmanager
def as_typed(entry: Entry, key: str = KEY) -> Iterator[None]:
    """Within the block, errors about settings of the entry's method name them as they stand in the entry.

    Raises:
        ConfigError: that of the block, without the `method.` of the command line.
    """
    try:
        yield
    except ConfigError as error:
        if type(error) is not ConfigError or key in str(error) or entry.method is None:
            raise
        said = re.sub(r"\bmethod\.(?=\w)", "", str(error))
        raise ConfigError(f"{key}: {entry.method.name}: {said}") from None


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


EVICTOR, DRAFT, SELECTOR = "evictor", "draft", "selector"
"""Roles that a system can bring to whoever runs it."""
FULL, POLICY, ARTIFACT, COMBINED, CACHE = "full", "policy", "artifact", "combined", "cache"
BUDGET_KEYS = ("budget_tokens", "budget_ratio")


@dataclass(frozen=True)
class System:
    """One way of running the target.

    Args:
        name: unique, such as `snapkv@128`.
        kind: `full`, `policy`, `artifact` (also a method without training), `combined`, `cache`, or a kind
            that a suite gives to a system of its own.
        family: the name without its budget: systems of a family form one line of a plot.
        budget: rows kept, or read at each step, as typed: `128` or `10%`; None where that is all of them.
        parts: draft, evictor, cache and selector for an engine.
        shape: what is drafted each cycle.
        facts: JSON values that its outputs follow from; a ledger with other facts is refused.
        lossless_of: the system with the same cache and no draft, whose texts it must repeat; None where there
            is none, nothing is drafted, or drafts are sampled.
        acceptance: the chance that a drafted token is accepted, where it is given and not measured.
        timed: whether its speed says something; that of an upper bound which nobody can run does not.
    """

    name: str
    kind: str
    family: str
    budget: str | None = None
    parts: Parts = field(default_factory=Parts)
    shape: TreeShape = PLAIN
    facts: Json = field(default_factory=dict)
    lossless_of: str | None = None
    acceptance: float | None = None
    timed: bool = True

    @property
    def drafts(self) -> bool:
        """Whether it speculates."""
        return self.parts.draft is not None and bool(self.shape.widths)

    @property
    def evicts(self) -> bool:
        """Whether it drops rows of the prompt."""
        return self.parts.evictor is not None

    @property
    def selects(self) -> bool:
        """Whether its steps read a part of the rows that it has."""
        return self.parts.selector is not None


FULL_CACHE = System("full", FULL, "full")


def shape_name(shape: TreeShape) -> str:
    """`chain 4`, `tree 4-8-8`, or `tree 10-10-10 best 24`."""
    if set(shape.widths) == {1}:
        return f"chain {shape.depth}"
    kept = "" if shape.keep is None else f" best {shape.keep}"
    return f"tree {'-'.join(str(width) for width in shape.widths)}{kept}"


def budget_label(budget: Budget) -> str:
    """`128` rows, or `10%` of the prompt."""
    return str(budget.tokens) if budget.ratio is None else f"{100 * budget.ratio:g}%"


def without_draft(system: System, systems: Sequence[System]) -> str | None:
    """The system whose texts a draft must repeat: the same one without the draft.

    None where there is none, or where a cache's own settings allow the texts to differ.
    """
    if not system.drafts:
        return None
    own = system.parts.cache is not None
    if not (system.evicts or system.selects or own):
        return FULL_CACHE.name
    same = [
        other.name
        for other in systems
        if not other.drafts
        and (other.evicts, other.selects, other.parts.cache is not None)
        == (system.evicts, system.selects, own)
        and (not own or _cache(other) == _cache(system) is not None)
        and (not (system.evicts or system.selects) or _budgeted(other) == _budgeted(system))
    ]
    return same[0] if same else None


def _cache(system: System) -> Json | None:
    """What texts on a system's own cache follow from; None where that is the draft too."""
    if named := system.facts.get("cache"):
        if named["name"] != "int8":
            return dict(named)
        values = {"name": "quantspec", "split": named["split"]}  # the cache that this method brings
    else:
        values = dict(system.facts["method"])
    spec = methods.get(values.pop("name"))
    law = None if spec.cache_law is None else spec.cache_law(spec.config(**values))
    return None if law is None else {"name": spec.name, **law}


def _budgeted(system: System) -> Json:
    """What a system's evictor or selector is made of."""
    facts = system.facts
    if "artifacts" not in facts:
        return {"policy": {k: v for k, v in facts.items() if k != "budget"}, "budget": facts["budget"]}
    chosen = [
        one
        for one in facts["artifacts"]
        if set(BUDGET_KEYS) <= set(methods.get(one["method"]).inference_keys)
    ]
    own = {"policy": facts["policy"]} if "policy" in facts else {"artifacts": chosen}
    if "policy" not in facts and "options" in facts:
        own["options"] = facts["options"]
    if "method" in facts and set(BUDGET_KEYS) <= set(methods.get(facts["method"]["name"]).inference_keys):
        own["method"] = facts["method"]
    return {**own, "budget": facts["budget"]}
