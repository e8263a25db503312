"""Defines a system, one way of running the target, and the grammar of its entry in a configuration.

`suite.systems` is the one grammar that every job reads. An entry is the name of a policy or of a method, or a
mapping. `{name: NAME, option: value}` is a policy or a method with options. Otherwise the keys name the parts
of a combination: `artifact`, `policy`, `method`, `cache`, and inference keys of the artifacts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from longtrain import methods
from longtrain.decoding.control import ShapeChoice
from longtrain.decoding.engine import PLAIN
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError, ConfigFaults
from longtrain.methods.named import Named, in_words, named
from longtrain.methods.policies import POLICIES
from longtrain.methods.prompt_lookup.config import Lookup
from longtrain.settings import AUTO, Count, Counts, Share, Text, convert, read, wrong

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
    "drafted": Counts | Literal["auto"],
    "shapes": tuple[tuple[Count, ...], ...],
    "acceptance": Share,
    "lookup": Lookup,
}
"""Keys of every entry -> type of their values."""


@dataclass(frozen=True)
class Entry:
    """One entry of `suite.systems`.

    Args:
        artifacts: names or folders of exported modules.
        policy: an eviction policy.
        method: a method that needs no training, or that should have random weights.
        cache: a cache by its name.
        options: inference keys of the attached parts.
        label: name of the system; None: composed from its parts' names.
        shapes: widths of the trees that it drafts; empty: those of the run.
        auto: True if the shape is chosen cycle by cycle (`decode=auto`).
        acceptance: probability that a drafted token is accepted, if it is simulated.
        lookup: `auto` joins look-up to its draft, `only` puts it in the draft's place; None: as the run does.
    """

    artifacts: tuple[str, ...] = ()
    policy: Named | None = None
    method: Named | None = None
    cache: Named | None = None
    options: Json = field(default_factory=dict)
    label: str | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    auto: bool = False
    acceptance: float | None = None
    lookup: str | None = None

    @property
    def is_policy(self) -> bool:
        """True if it is an eviction policy and nothing else."""
        others = self.artifacts or self.method or self.cache or self.lookup not in (None, "off")
        return self.policy is not None and not others

    def called(self, *, method: str | None = None) -> str:
        """Return the name of its systems, without budget and shape.

        Args:
            method: words for the method, instead of those that were typed.
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
        names += [] if self.lookup in (None, "off") else [f"lookup {self.lookup}"]
        return in_words("+".join(names), self.options)

    def config(self) -> Any:
        """Return the method's settings.

        Raises:
            ConfigError: there is no such method or setting, or a value is not allowed.
        """
        assert self.method is not None
        return read(methods.config_class(self.method.name), self.method.options, "method")


def parse(value: Any) -> Entry:
    """Parse an entry as it was typed; one that is parsed already stays as it is.

    Raises:
        ConfigError: it has none of the allowed forms, or a key has a value that is not allowed.
    """
    if isinstance(value, Entry):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or {"name", *PARTS}.isdisjoint(value):
        raise wrong(f"{KEY}: entry", value, ALLOWED)
    rest = dict(value)
    common = {
        key: convert(rest.pop(key), kind, f"{KEY}: {key}") for key, kind in _EVERYWHERE.items() if key in rest
    }
    drafted = common.pop("drafted", ())
    if drafted == AUTO:
        drafted, common["auto"] = (), True
        if "shapes" in common:
            shapes = [list(widths) for widths in common["shapes"]]
            raise wrong(f"{KEY}: shapes", shapes, "left out beside drafted=auto")
    drafted = tuple((1,) * count for count in drafted)
    common["shapes"] = (*drafted, *common.pop("shapes", ()))
    if "name" in rest:
        return Entry(**_bare(rest), **common)
    listed = rest.pop("artifact", None)
    artifacts = listed if isinstance(listed, list | tuple) else [listed] if listed else []
    parts: Json = {key: named(key, rest.pop(key, None), KEY) for key in PARTS[1:]}
    return Entry(artifacts=tuple(map(str, artifacts)), options=rest, **parts, **common)


def parse_all(values: Any) -> list[Entry]:
    """Parse the entries of `suite.systems`.

    Raises:
        ConfigError: it is no list, or an entry is wrong.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        raise wrong(KEY, values, "a list, [snapkv,{artifact: NAME}]")
    return [parse(value) for value in values]


def check_methods(entries: Iterable[Entry], key: str = KEY) -> None:
    """Refuse wrong settings of the entries' methods, naming the key that they were typed under.

    Raises:
        ConfigError: there is no such method or setting, or a value is not allowed.
    """
    for entry in entries:
        if entry.method is not None:
            with as_typed(entry, key):
                entry.config()


@contextmanager
def as_typed(entry: Entry, key: str = KEY) -> Iterator[None]:
    """Context manager that makes errors about the entry's method name the settings as typed in the entry.

    Raises:
        ConfigError: the block's error, without the `method.` of the command line.
    """
    try:
        yield
    except ConfigError as error:
        if type(error) not in (ConfigError, ConfigFaults) or key in str(error) or entry.method is None:
            raise
        said = re.sub(r"\bmethod\.(?=\w)", "", str(error))
        raise ConfigError(f"{key}: {entry.method.name}: {said}") from None


def _bare(rest: Json) -> Json:
    """Resolve `NAME` or `{name: NAME, option: value}` to a policy or a method."""
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
"""Roles that a system's parts can fill."""
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
        budget: KV entries kept, or read at each step, as typed: `128` or `10%`; None: all of them.
        parts: draft, evictor, cache and selector for an engine.
        shape: shape of the tree that is drafted in each cycle, or the shapes that cycles choose among.
        facts: JSON values that decide its outputs; a results journal with other facts is refused.
        lossless_of: the system with the same cache and no draft, whose text it must repeat; None if there
            is none, nothing is drafted, or drafts are sampled.
        acceptance: probability that a drafted token is accepted, if it is simulated and not measured.
        timed: True if its speed is meaningful; that of an upper bound that cannot be run in practice is not.
    """

    name: str
    kind: str
    family: str
    budget: str | None = None
    parts: Parts = field(default_factory=Parts)
    shape: TreeShape | ShapeChoice = PLAIN
    facts: Json = field(default_factory=dict)
    lossless_of: str | None = None
    acceptance: float | None = None
    timed: bool = True

    @property
    def drafts(self) -> bool:
        """True if it speculates."""
        chosen = isinstance(self.shape, ShapeChoice)
        return self.parts.draft is not None and (chosen or bool(self.shape.widths))

    @property
    def nodes(self) -> int:
        """Most nodes of a tree that it verifies, the root included."""
        if isinstance(self.shape, TreeShape):
            return self.shape.n_nodes
        return max(one.n_nodes for one in self.shape.shapes(self.parts.draft, sampled=True))

    @property
    def evicts(self) -> bool:
        """True if it drops KV entries of the prompt."""
        return self.parts.evictor is not None

    @property
    def selects(self) -> bool:
        """True if its steps read a part of its KV entries."""
        return self.parts.selector is not None


FULL_CACHE = System("full", FULL, "full")


def shape_name(shape: TreeShape) -> str:
    """Return the draft's part of a shape in words: `chain 4`, `tree 4-8-8`, or `tree 10-10-10 best 24`."""
    if set(shape.widths) == {1}:
        return f"chain {len(shape.widths)}"
    kept = "" if shape.keep is None else f" best {shape.keep}"
    return f"tree {'-'.join(str(width) for width in shape.widths)}{kept}"


def budget_label(budget: Budget) -> str:
    """Return a budget in words: `128` entries, or `10%` of the prompt."""
    return str(budget.tokens) if budget.ratio is None else f"{100 * budget.ratio:g}%"


def without_draft(system: System, systems: Sequence[System]) -> str | None:
    """Return the name of the system whose text a draft must repeat: the same one without the draft.

    None if there is none, or if a cache's own settings allow the text to differ.
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
    """Return the settings of a system's own cache that decide its text; None if the draft matters too."""
    if named := system.facts.get("cache"):
        if named["name"] != "int8":
            return dict(named)
        values = {"name": "quantspec", "split": named["split"]}  # the cache of this method
    else:
        values = dict(system.facts["method"])
    spec = methods.get(values.pop("name"))
    children = None if spec.text_settings is None else spec.text_settings(spec.config(**values))
    return None if children is None else {"name": spec.name, **children}


def _budgeted(system: System) -> Json:
    """Return the facts of a system's evictor or selector."""
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
