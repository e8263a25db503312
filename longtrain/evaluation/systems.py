"""Ways of running the target that are compared: the full cache, policies, artifacts, and combinations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.evict import Budget, Evictor
from longtrain.decoding.roles import Law, Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.evaluation.eviction_policies import Entry, artifact_facts, policy_of
from longtrain.evaluation.eviction_protocol import label
from longtrain.evaluation.suite import DRAFT, EVICTOR, Suite
from longtrain.methods.policies import POLICIES

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Json = dict[str, Any]
FULL, POLICY, ARTIFACT, COMBINED = "full", "policy", "artifact", "combined"
BUDGET_KEYS = ("budget_tokens", "budget_ratio")
ALLOWED = (
    "NAME of a policy, {name: NAME, option: value}, {artifact: NAME}, {artifact: [NAME, NAME]}, "
    "{artifact: NAME, policy: NAME} or {method: NAME} (one without training, alone or beside these)"
)


@dataclass(frozen=True)
class System:
    """One way of running the target.

    Args:
        name: unique, e.g. `snapkv@128`.
        kind: `full`, `policy`, `artifact` or `combined`.
        family: the name without its budget: systems of a family form one line of a plot.
        budget: rows kept, as typed: `128` or `10%`; None where nothing is evicted.
        parts: draft, evictor and cache for an engine.
        shape: what is drafted each cycle.
        facts: JSON values that its outputs follow from; a ledger of other facts is refused.
        lossless_of: the system with the same cache and no draft, whose texts it must repeat; None where there
            is none, nothing is drafted, or drafts are sampled.
    """

    name: str
    kind: str
    family: str
    budget: str | None = None
    parts: Parts = field(default_factory=Parts)
    shape: TreeShape = PLAIN
    facts: Json = field(default_factory=dict)
    lossless_of: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether it speculates."""
        return self.parts.draft is not None and bool(self.shape.widths)

    @property
    def evicts(self) -> bool:
        """Whether it drops rows of the prompt."""
        return self.parts.evictor is not None


FULL_CACHE = System("full", FULL, "full")


@dataclass(frozen=True)
class Builder:
    """Makes systems from what was typed.

    Args:
        target: the frozen model.
        budgets: what evicting systems are made with, each.
        shapes: what drafting systems are made with, each.
        load: an artifact by its name or folder.
        greedy: whether every answer is decoded greedily; a sampled one is that of plain decoding only where
            drafts are chosen deterministically.
        attached: parts made so far.
    """

    target: Target
    budgets: Sequence[Budget]
    shapes: Sequence[TreeShape]
    load: Callable[[str], Artifact]
    greedy: bool = True
    attached: dict[str, Parts] = field(default_factory=dict)

    def systems(self, suite: Suite, entries: Sequence[Entry]) -> list[System]:
        """The full cache and what the entries name, in this order.

        Raises:
            ConfigError: an unknown policy, option or kind of entry, two systems of one name, an artifact that
                cannot serve the suite, or a budget below the rows that a policy keeps in any case.
            ConflictError: two parts of one system play one role.
            TargetMismatchError: an artifact of another target.
        """
        found = [FULL_CACHE]
        for entry in entries:
            if isinstance(entry, str):
                entry = {"name": entry}
            if isinstance(entry, Mapping) and not {"artifact", "method"}.isdisjoint(entry):
                found += self._artifacts(suite, dict(entry))
            elif isinstance(entry, Mapping) and "name" in entry:
                found += self._policies(suite, dict(entry))
            else:
                raise ConfigError(f"suite.systems entry {entry}; allowed: {ALLOWED}")
        names = [system.name for system in found]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(
                f"suite.systems has two systems named {twice[0]}; give each once, or one of them a `label`"
            )
        for system in found:
            Engine(self.target, system.parts)  # refuses parts that cannot go together
        return [replace(system, lossless_of=self._plain_of(system, found)) for system in found]

    def _plain_of(self, system: System, systems: Sequence[System]) -> str | None:
        same = self.greedy or system.shape.law is Law.POINT
        return without_draft(system, systems) if same else None

    def _policies(self, suite: Suite, entry: Json) -> Iterator[System]:
        if entry["name"] not in POLICIES:
            raise ConfigError(
                f"suite.systems has {entry['name']}: unknown eviction policy '{entry['name']}'; known: "
                f"{', '.join(POLICIES)}; other entries: {ALLOWED}"
            )
        policy = policy_of(entry)
        _check_role(suite, f"policy {policy.name}", EVICTOR)
        parts = Parts(name=policy.name)
        plain = System(policy.name, POLICY, policy.name, parts=parts, facts=policy.facts)
        yield from self._at_budgets(plain, policy.make)

    def _artifacts(self, suite: Suite, entry: Json) -> Iterator[System]:
        """Artifacts, a method without training and a policy, or some of these, as one system.

        It is made at every budget if something evicts, and with every shape if something drafts.
        """
        asked, method, policy, title = (
            entry.pop(key, None) for key in ("artifact", "method", "policy", "label")
        )
        where = [str(one) for one in (asked if isinstance(asked, list | tuple) else [asked] if asked else [])]
        loaded = [self.load(one) for one in where]
        self._check_options(where, loaded, entry)
        facts: Json = {"artifacts": [artifact_facts(*one) for one in zip(where, loaded, strict=True)]}
        names, parts = [Path(one).name for one in where], [self._attach(one, entry) for one in loaded]
        if method is not None:
            made, facts["method"], words = self._untrained(*_named(method))
            names.append(words)
            parts.append(made)
        extra = policy_of({"name": policy} if isinstance(policy, str) else policy) if policy else None
        if extra is not None:
            names.append(extra.name)
            parts.append(Parts(evictor=_made(extra.make, self._budgets(extra.name)[0]), name=extra.name))
            facts["policy"] = extra.facts
        facts |= {"options": entry} if entry else {}
        whole, who = Parts().merge(*parts), "+".join(names)
        family = str(title or _words(who, entry))
        for role, part in ((DRAFT, whole.draft), (EVICTOR, whole.evictor)):
            if part is not None:
                _check_role(suite, who, role, method=facts.get("method", {}))
        kind = ARTIFACT if len(parts) == 1 else COMBINED
        for system in self._at_shapes(System(family, kind, family, parts=whole, facts=facts)):
            if whole.evictor is None:
                yield system
            else:
                make = extra.make if extra else whole.evictor.with_budget  # type: ignore[attr-defined]
                yield from self._at_budgets(system, make)

    def _at_shapes(self, system: System) -> Iterator[System]:
        """A system with every shape that its draft is to have; as it is where nothing drafts."""
        if system.parts.draft is None:
            yield system
            return
        if not self.shapes:
            raise ConfigError(
                f"{system.name} drafts, and decode.shape=[]; pass decode=chain, or suite.shapes=[[1,1,1,1]]"
            )
        for shape in self.shapes:
            name = f"{system.name} {shape_name(shape)}" if len(self.shapes) > 1 else system.name
            facts = {**system.facts, "shape": list(shape.widths), "law": shape.law.value}
            yield replace(system, name=name, family=name, shape=shape, facts=facts)

    def _at_budgets(self, system: System, make: Callable[[Budget], Evictor] | None) -> Iterator[System]:
        """A system with its evictor at every budget."""
        for budget in self._budgets(system.name):
            yield replace(
                system,
                name=f"{system.name}@{label(budget)}",
                budget=label(budget),
                parts=replace(system.parts, evictor=_made(make, budget)),
                facts={**system.facts, "budget": label(budget)},
            )

    def _budgets(self, name: str) -> Sequence[Budget]:
        if not self.budgets:
            raise ConfigError(f"suite.budgets=[] and {name} evicts; pass e.g. suite.budgets=[64,128]")
        return self.budgets

    def _attach(self, artifact: Artifact, options: Json) -> Parts:
        """An artifact's parts, checked and made once for all systems that have them."""
        keys = methods.get(artifact.method).inference_keys
        given = {key: value for key, value in options.items() if key in keys}
        if set(BUDGET_KEYS) <= set(keys):
            budget = self._budgets(artifact.method)[0]
            given |= {"budget_tokens": budget.tokens, "budget_ratio": budget.ratio}
        name = json.dumps([str(artifact.folder), given], sort_keys=True)
        if name not in self.attached:
            self.attached[name] = artifact.attach(self.target, **given)
        return self.attached[name]

    def _untrained(self, name: str, options: Json) -> tuple[Parts, Json, str]:
        """The parts of a method without training, its settings, and its name with what is not a default.

        Raises:
            ConfigError: no such method or option, or the method needs an artifact.
        """
        spec = methods.get(name)
        if spec.objective is not None or spec.attach is None:
            raise ConfigError(
                f"suite.systems entry {{method: {name}}}: {name} is trained; export it and pass "
                "{artifact: NAME}"
            )
        known = [one.name for one in fields(spec.config)]
        if unknown := [key for key in options if key not in known]:
            raise ConfigError(f"method {name} has no option '{unknown[0]}'; known: {', '.join(known)}")
        config = spec.config(**options)
        key = json.dumps([name, options], sort_keys=True)
        if key not in self.attached:
            module = spec.build(config, self.target.info)
            self.attached[key] = spec.attach(module, self.target, config, {})
        usual = vars(spec.config())
        changed = {key: value for key, value in vars(config).items() if value != usual[key]}
        return self.attached[key], {"name": name, **vars(config)}, _words(name, changed)

    def _check_options(self, where: list[str], loaded: Sequence[Artifact], options: Json) -> None:
        for key in options:
            if key in BUDGET_KEYS:
                raise ConfigError(
                    f"suite.systems entry of artifact {', '.join(where)}: {key}={options[key]}; every system "
                    "runs at the budgets of the suite: pass suite.budgets=[64,128] and leave it out here"
                )
            known = [
                k for one in loaded for k in methods.get(one.method).inference_keys if k not in BUDGET_KEYS
            ]
            if key not in known:
                raise ConfigError(
                    f"suite.systems entry of artifact {', '.join(where)} has the key {key}={options[key]}; "
                    f"allowed: artifact, policy, label{''.join(f', {k}' for k in known)}"
                )


def shape_name(shape: TreeShape) -> str:
    """`chain 4` or `tree 4-8-8`."""
    if set(shape.widths) == {1}:
        return f"chain {shape.depth}"
    return f"tree {'-'.join(str(width) for width in shape.widths)}"


def _made(make: Callable[[Budget], Evictor] | None, budget: Budget) -> Evictor:
    """An evictor, refused where its budget has no room for what it keeps in any case."""
    assert make is not None
    evictor = make(budget)
    least = int(getattr(evictor, "least_budget", 1))
    if budget.tokens is not None and budget.tokens < least:
        raise ConfigError(
            f"suite.budgets has {budget.tokens} rows and {evictor.name} keeps {least} in any case; pass "
            f"budgets of at least {least}, or a smaller window"
        )
    return evictor


def _named(entry: Any) -> tuple[str, Json]:
    """Name and options of `NAME` or `{name: NAME, option: value}`."""
    if isinstance(entry, Mapping) and "name" in entry:
        return str(entry["name"]), {key: value for key, value in entry.items() if key != "name"}
    if not isinstance(entry, str):
        raise ConfigError(
            f"suite.systems entry method={entry}; allowed: NAME or {{name: NAME, option: value}}"
        )
    return entry, {}


def _words(name: str, options: Mapping[str, Any]) -> str:
    """`lookaheadkv adaptive=heads`."""
    shown = {True: "true", False: "false", None: "null"}
    return " ".join(
        [name, *(f"{k}={shown.get(v, v) if isinstance(v, bool | None) else v}" for k, v in options.items())]
    )


def without_draft(system: System, systems: Sequence[System]) -> str | None:
    """The system whose texts a draft must repeat: the same cache, the same evictor and budget, and no draft.

    None where there is none, or the texts need not be the same by a cache's own settings.
    """
    if not system.drafts:
        return None
    own = system.parts.cache is not None
    if not system.evicts and not own:
        return FULL_CACHE.name
    same = [
        other.name
        for other in systems
        if not other.drafts
        and (other.evicts, other.parts.cache is not None) == (system.evicts, own)
        and (not own or _cache(other) == _cache(system) is not None)
        and (not system.evicts or _eviction(other) == _eviction(system))
    ]
    return same[0] if same else None


def _cache(system: System) -> Json | None:
    """What texts on a system's own cache follow from; None where that is the draft too."""
    values = dict(system.facts["method"])
    spec = methods.get(values.pop("name"))
    law = None if spec.cache_law is None else spec.cache_law(spec.config(**values))
    return None if law is None else {"name": spec.name, **law}


def _eviction(system: System) -> Json:
    """What a system's evictor is made of."""
    facts = system.facts
    if system.kind == POLICY:
        return {"policy": {k: v for k, v in facts.items() if k != "budget"}, "budget": facts["budget"]}
    evicting = [
        one
        for one in facts["artifacts"]
        if set(BUDGET_KEYS) <= set(methods.get(one["method"]).inference_keys)
    ]
    own = {"policy": facts["policy"]} if "policy" in facts else {"artifacts": evicting}
    if "policy" not in facts and "options" in facts:
        own["options"] = facts["options"]
    return {**own, "budget": facts["budget"]}


def _check_role(suite: Suite, who: str, role: str, *, method: Mapping[str, Any] | None = None) -> None:
    """Refuse what the suite has no use for; a method without training can perhaps leave it out."""
    if role in suite.needs:
        return
    what = "a draft" if role == DRAFT else "an evictor"
    hint = _SERVED[role]
    if method and method.get(role) is True:
        hint = f"its cache alone is {{method: {{name: {method['name']}, {role}: false}}}}; {hint}"
    raise ConfigError(
        f"{who} brings {what}, which suite {suite.name} has no use for (it takes: "
        f"{', '.join(sorted(suite.needs)) or 'the full cache alone'}); {hint}"
    )


_SERVED = {
    DRAFT: "a draft is measured where text is generated: suite=speculation, acceptance, longbench, aime24",
    EVICTOR: "an evictor is measured by suite=longbench, ruler, needle, perplexity, eviction",
}
