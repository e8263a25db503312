"""Builds systems from entries of a configuration: loads artifacts, attaches methods, checks parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.cache.named import options_of
from longtrain.decoding.control import ShapeChoice
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget, Evictor
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape, completed
from longtrain.errors import ConfigError
from longtrain.methods import policies
from longtrain.methods.named import Named, in_words
from longtrain.methods.prompt_lookup.joined import with_lookup
from longtrain.methods.target_cache import named_cache
from longtrain.settings import AUTO, wrong
from longtrain.systems.system import (
    ARTIFACT,
    BUDGET_KEYS,
    CACHE,
    COMBINED,
    DRAFT,
    EVICTOR,
    FULL_CACHE,
    KEY,
    POLICY,
    SELECTOR,
    Entry,
    Json,
    System,
    as_typed,
    budget_label,
    parse_all,
    shape_name,
    without_draft,
)

if TYPE_CHECKING:
    from longtrain.targets.model import Target

MakeEvictor = Callable[[Budget], Evictor]
ROLES = frozenset({EVICTOR, DRAFT, SELECTOR})


def _argmax_shape(widths: Sequence[int]) -> TreeShape:
    return TreeShape(tuple(widths))


@dataclass(frozen=True)
class Builder:
    """Builds systems for a target.

    Args:
        target: the frozen model.
        budgets: an evicting system is built once with each.
        shapes: a drafting system whose entry names no shapes is built once with each.
        load: returns an artifact by its name or folder.
        greedy: True if every answer is decoded greedily; a sampled answer equals plain decoding's only if
            drafts are chosen deterministically.
        shape_of: makes a shape from the widths that an entry names.
        lookup: look-up beside the drafts of entries that do not say it themselves: off, auto or only.
        random_seed: seed of random weights for methods that would have to be trained; None: such methods
            are refused.
    """

    target: Target
    budgets: Sequence[Budget]
    shapes: Sequence[TreeShape]
    load: Callable[[str], Artifact]
    greedy: bool = True
    shape_of: Callable[[Sequence[int]], TreeShape] = _argmax_shape
    lookup: str = "off"
    random_seed: int | None = None
    _attached: dict[str, Parts] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Parts built so far, which systems with equal settings share."""

    def systems(
        self,
        values: Sequence[Any],
        *,
        roles: Collection[str] = ROLES,
        taker: str = "",
        own: Callable[[Builder], Sequence[System]] | None = None,
    ) -> list[System]:
        """Return the full cache, the caller's own systems, and those of the entries, in this order.

        Args:
            values: entries as typed or parsed (`system.parse`).
            roles: roles that systems may fill.
            taker: name of the caller, for messages (`suite needle`).
            own: builds further systems.

        Raises:
            ConfigError: an entry is wrong, two systems have one name, an artifact cannot serve the caller, or
                a budget is below the entries that a policy always keeps.
            ConflictError: two parts of one system fill one role.
            TargetMismatchError: an artifact of another target.
        """
        found = [FULL_CACHE, *(own(self) if own else ())]
        for entry in parse_all(values):
            with as_typed(entry):
                found += self.of(entry, roles=roles, taker=taker)
        names = [system.name for system in found]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(
                f"{KEY} has two systems named {twice[0]}; give each once, or one of them a `label`"
            )
        for system in found:
            Engine(self.target, system.parts)  # raises if parts cannot be combined
        return [replace(system, lossless_of=self._plain_of(system, found)) for system in found]

    def of(self, entry: Entry, *, roles: Collection[str] = ROLES, taker: str = "") -> list[System]:
        """Return the systems of one entry: one for each of its shapes and budgets.

        Args:
            entry: a result of `parse`.
            roles: see `systems`.
            taker: see `systems`.
        """
        if entry.is_policy:
            return self._policies(entry, roles, taker)
        return list(self._combined(entry, roles, taker))

    def evicting(
        self, name: str, kind: str, make: MakeEvictor, facts: Json, *, timed: bool = True
    ) -> list[System]:
        """Return systems that evict and nothing else, one per budget.

        Args:
            name: name of the family.
            kind: see `System`.
            make: returns their evictor for a budget.
            facts: see `System`.
            timed: see `System`.
        """
        plain = System(name, kind, name, parts=Parts(name=name), facts=facts, timed=timed)
        return list(self._at_budgets(plain, EVICTOR, partial(_made, make)))

    def _plain_of(self, system: System, systems: Sequence[System]) -> str | None:
        shape = system.shape
        points = isinstance(shape, TreeShape) and shape.children is ChildChoice.POINT
        return without_draft(system, systems) if self.greedy or points else None

    def _policies(self, entry: Entry, roles: Collection[str], taker: str) -> list[System]:
        assert entry.policy is not None
        policy, name = entry.policy, entry.called()
        if entry.shapes or entry.auto or entry.options:
            word = "drafted" if entry.shapes or entry.auto else next(iter(entry.options))
            raise ConfigError(
                f"{KEY} entry of policy {name} has {word}, and a policy alone takes no such key"
            )
        check_role(f"policy {name}", EVICTOR, roles, taker)
        return self.evicting(name, POLICY, _policy_maker(policy), _policy_facts(policy))

    def _combined(self, entry: Entry, roles: Collection[str], taker: str) -> Iterator[System]:
        """Yield the systems that combine an entry's artifacts, method, policy and cache.

        There is one for every budget if something evicts or selects, and for every shape if something drafts.
        """
        loaded = [self.load(one) for one in entry.artifacts]
        self._check_options(entry, loaded)
        whole, (facts, words) = self.parts(entry, loaded), self._facts(entry, loaded)
        family = entry.called(method=words)
        for role, part in ((DRAFT, whole.draft), (EVICTOR, whole.evictor), (SELECTOR, whole.selector)):
            if part is not None:
                check_role(family, role, roles, taker, method=facts.get("method", {}))
        count = len(loaded) + sum(one is not None for one in (entry.method, entry.policy, entry.cache))
        alone = CACHE if entry.cache is not None else ARTIFACT
        kind = alone if count == 1 and entry.policy is None else COMBINED
        system = System(family, kind, family, parts=whole, facts=facts, acceptance=entry.acceptance)
        for shaped in self._at_shapes(system, entry):
            if whole.selector is not None:
                yield from self._at_budgets(shaped, SELECTOR, whole.selector.with_budget)
            elif whole.evictor is None:
                yield shaped
            else:
                evict = _policy_maker(entry.policy) if entry.policy else whole.evictor.with_budget  # type: ignore[attr-defined]
                yield from self._at_budgets(shaped, EVICTOR, partial(_made, evict))

    def parts(self, entry: Entry, loaded: Sequence[Artifact]) -> Parts:
        """Return draft, evictor and cache of an entry, the evictor with the first budget.

        Args:
            entry: a result of `parse`.
            loaded: its artifacts, in their order.

        Raises:
            ConfigError: an option is wrong, or something evicts and there is no budget.
            ConflictError: two of its parts fill one role.
            TargetMismatchError: an artifact of another target.
        """
        parts = [self._artifact(one, entry.options) for one in loaded]
        if entry.method is not None:
            parts.append(self._method(entry)[0])
        if (policy := entry.policy) is not None:
            evictor = _policy_maker(policy)(self._budgets(policy.words)[0])
            parts.append(Parts(evictor=evictor, name=policy.words))
        if entry.cache is not None:
            parts.append(Parts(cache=named_cache(entry.cache, self.target), name=entry.cache.words))
        return with_lookup(Parts().merge(*parts), self._lookup(entry))

    def _facts(self, entry: Entry, loaded: Sequence[Artifact]) -> tuple[Json, str | None]:
        """Return the facts that decide the outputs of an entry's systems, and its method in words."""
        found, words = zip(entry.artifacts, loaded, strict=True), None
        facts: Json = {"artifacts": [artifact_facts(where, one) for where, one in found]}
        if entry.method is not None:
            _, facts["method"], words = self._method(entry)
        if entry.policy is not None:
            facts["policy"] = _policy_facts(entry.policy)
        if entry.cache is not None:
            facts["cache"] = {"name": entry.cache.name, **options_of(entry.cache.name, entry.cache.options)}
        facts |= {"options": entry.options} if entry.options else {}
        facts |= {} if (lookup := self._lookup(entry)) == "off" else {"lookup": lookup}
        facts |= {} if entry.acceptance is None else {"acceptance": entry.acceptance}
        return facts, words

    def _lookup(self, entry: Entry) -> str:
        """Return how look-up stands beside the entry's draft."""
        return self.lookup if entry.lookup is None else entry.lookup

    def _at_shapes(self, system: System, entry: Entry) -> Iterator[System]:
        """Yield a system with every shape that its draft should have; unchanged if it has no draft."""
        draft = system.parts.draft
        if draft is None and (entry.shapes or entry.auto):
            raise ConfigError(f"{system.name} drafts nothing; leave out `drafted` and `shapes`")
        if entry.lookup == "auto" and draft is None:
            raise ConfigError(f"{system.name} has no draft for lookup=auto to join; pass lookup=only or off")
        if entry.lookup == "auto" and getattr(draft, "cuts", False):
            raise ConfigError(
                f"{system.name} leaves out nodes of low confidence (method.min_confidence), and with copied "
                "nodes (lookup=auto) their number is fixed, so nothing would be saved; pass min_confidence=0 "
                "to join look-up, or leave out lookup"
            )
        if draft is None:
            yield system
            return
        if entry.auto:
            name = system.name if entry.label else f"{system.name} {AUTO}"
            facts = {**system.facts, "shape": AUTO}
            yield replace(system, name=name, family=name, shape=ShapeChoice(), facts=facts)
            return
        shapes = [self.shape_of(widths) for widths in entry.shapes] or self.shapes
        if not shapes:
            raise ConfigError(
                f"{system.name} drafts, and decode.shape=[]; pass decode=chain, or suite.shapes=[[1,1,1,1]]"
            )
        for drafted in shapes:
            shape = completed(drafted, system.parts.draft)
            name = f"{system.name} {shape_name(shape)}" if len(shapes) > 1 else system.name
            facts = {**system.facts, "shape": list(shape.widths), "children": shape.children.value}
            if shape.keep is not None:
                facts["keep"] = shape.keep
            if shape.copied:
                facts["copied"] = shape.copied
            yield replace(system, name=name, family=name, shape=shape, facts=facts)

    def _at_budgets(self, system: System, role: str, make: Callable[[Budget], Any]) -> Iterator[System]:
        """Yield a system with its evictor or selector at every budget."""
        for budget in self._budgets(system.name):
            yield replace(
                system,
                name=f"{system.name}@{budget_label(budget)}",
                budget=budget_label(budget),
                parts=replace(system.parts, **{role: make(budget)}),
                facts={**system.facts, "budget": budget_label(budget)},
            )

    def _budgets(self, name: str) -> Sequence[Budget]:
        if not self.budgets:
            raise ConfigError(
                f"suite.budgets=[] and {name} evicts or selects; pass e.g. suite.budgets=[64,128]"
            )
        return self.budgets

    def _artifact(self, artifact: Artifact, options: Json) -> Parts:
        """Return an artifact's parts, checked and built once for all systems that share them."""
        given = self._keys(artifact.method, options)
        name = json.dumps([str(artifact.folder), given], sort_keys=True)
        if name not in self._attached:
            self._attached[name] = artifact.attach(self.target, **given)
        return self._attached[name]

    def _keys(self, method: str, options: Json) -> Json:
        """Return the inference keys to attach a method with, and the first budget if it evicts."""
        keys = methods.get(method).inference_keys
        given = {key: value for key, value in options.items() if key in keys}
        if set(BUDGET_KEYS) <= set(keys):
            budget = self._budgets(method)[0]
            given |= {"budget_tokens": budget.tokens, "budget_ratio": budget.ratio}
        return given

    def _method(self, entry: Entry) -> tuple[Parts, Json, str]:
        """Return the parts of a method without an artifact, its settings, and its name with changed ones."""
        assert entry.method is not None
        name, target = entry.method.name, self.target
        spec = methods.get(name)
        trained = spec.objective is not None
        if spec.attach is None or (trained and self.random_seed is None):
            raise ConfigError(
                f"{KEY} entry {{method: {name}}}: {name} is trained; export it and pass {{artifact: NAME}}"
            )
        config = entry.config()
        facts = {"name": name, **vars(config)} | ({"random_seed": self.random_seed} if trained else {})
        given = self._keys(name, entry.options)
        key = json.dumps([facts, given], sort_keys=True)
        if key not in self._attached:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.random_seed or 0)
                module = spec.build(config, target.info)
            module = module.to(target.device, target.dtype).eval() if trained else module
            self._attached[key] = spec.attach(module, target, config, given)
        usual = vars(spec.config())
        changed = {option: value for option, value in vars(config).items() if value != usual[option]}
        return self._attached[key], facts, in_words(name, changed)

    def _check_options(self, entry: Entry, loaded: Sequence[Artifact]) -> None:
        names = [one.method for one in loaded] + ([entry.method.name] if entry.method else [])
        known = [key for name in names for key in methods.get(name).inference_keys if key not in BUDGET_KEYS]
        who = f"artifact {', '.join(entry.artifacts)}" if entry.artifacts else entry.called()
        for key, value in entry.options.items():
            if key in BUDGET_KEYS:
                raise ConfigError(
                    f"{KEY} entry of {who}: {key}={value}; every system runs at the budgets of the suite: "
                    "pass suite.budgets=[64,128] and leave it out here"
                )
            if key not in known:
                words = (
                    "artifact", "policy", "method", "cache", "label", "drafted", "shapes", "acceptance",
                    "lookup",
                )  # fmt: skip
                raise wrong(f"{KEY} entry of {who}: {key}", value, ", ".join([*words, *known]))


def artifact_facts(where: str, artifact: Artifact) -> Json:
    """Return the facts that decide an artifact's outputs: its weights, and the settings for their use.

    Args:
        where: name or folder that it was loaded by; the last part is its name.
        artifact: the loaded artifact.
    """
    return {
        "artifact": Path(where).name,
        "method": artifact.method,
        "config": dict(artifact.config),
        "weights": artifact.checksum(),
        **({} if artifact.verified else {"unverified": True}),
    }


def check_role(
    who: str, role: str, roles: Collection[str], taker: str, *, method: Mapping[str, Any] | None = None
) -> None:
    """Refuse a role that the caller cannot use; a method without training may be able to leave it out."""
    if role in roles:
        return
    what = {DRAFT: "a draft", EVICTOR: "an evictor", SELECTOR: "a selector"}[role]
    hint = _SERVED[role]
    if method and method.get(role) is True:
        hint = f"its cache alone is {{method: {{name: {method['name']}, {role}: false}}}}; {hint}"
    raise ConfigError(
        f"{who} brings {what}, which {taker} has no use for (it takes: "
        f"{', '.join(sorted(roles)) or 'the full cache alone'}); {hint}"
    )


_SERVED = {
    DRAFT: "a draft is measured where text is generated: suite=speculation, acceptance, longbench",
    SELECTOR: "a selector is measured by suite=retrieval, longbench, ruler, needle, perplexity, speculation",
    EVICTOR: "an evictor is measured by suite=longbench, ruler, needle, perplexity, eviction",
}


def _policy_maker(policy: Named) -> MakeEvictor:
    return lambda budget: policies.make(policy.name, budget, policy.options)


def _policy_facts(policy: Named) -> Json:
    return {"policy": policy.name, **policy.options}


def _made(make: MakeEvictor, budget: Budget) -> Evictor:
    """Build an evictor, refusing a budget below the entries that it always keeps."""
    evictor = make(budget)
    least = int(getattr(evictor, "least_budget", 1))
    if budget.tokens is not None and budget.tokens < least:
        raise ConfigError(
            f"suite.budgets has {budget.tokens} entries and {evictor.name} always keeps {least}; pass "
            f"budgets of at least {least}, or a smaller window"
        )
    return evictor
