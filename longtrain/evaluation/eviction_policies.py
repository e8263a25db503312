"""Contenders of the eviction suite from what was typed: policies by name, artifacts, either with options."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.artifact.folder import MODEL
from longtrain.decoding.evict import Budget, Evictor
from longtrain.decoding.select import check_protected
from longtrain.errors import ConfigError
from longtrain.evaluation.eviction_protocol import (
    ARTIFACT,
    BASELINE,
    FULL_CACHE,
    ORACLE,
    Contender,
    Json,
    Protocol,
)
from longtrain.evaluation.eviction_ranks import ToldOracle
from longtrain.methods import policies
from longtrain.methods.policies.base import Scorer

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Entry = str | Mapping[str, Any]
"""`snapkv`, `{name: adakv, over: snapkv}`, `{artifact: NAME, adaptive: heads}`; any with a `label`."""


def contenders(
    target: Target,
    entries: Sequence[Entry],
    protocol: Protocol,
    *,
    load: Callable[[str], Artifact],
    oracle: bool = True,
) -> list[Contender]:
    """The full cache, the oracle, and what the entries name, in this order; each is made once to be checked.

    Args:
        target: the frozen model.
        entries: see `Entry`.
        protocol: its budgets are what evictors are made with.
        load: an artifact by its name or folder.
        oracle: whether to bring the oracle.

    Raises:
        ConfigError: an unknown policy or option, a budget below the rows a policy keeps in any case, or an
            artifact that brings no evictor.
        TargetMismatchError: an artifact of another target.
    """
    found = [FULL_CACHE]
    if oracle:
        found.append(_oracle(protocol))
    for entry in entries:
        if isinstance(entry, str):
            found.append(policy_of({"name": entry}))
        elif isinstance(entry, Mapping) and "artifact" in entry:
            found.append(_artifact(target, dict(entry), protocol.budgets[0], load))
        elif isinstance(entry, Mapping) and "name" in entry:
            found.append(policy_of(dict(entry)))
        else:
            raise ConfigError(
                f"suite.policies entry {entry}; allowed: NAME, {{name: NAME, option: value}} or "
                "{artifact: NAME}"
            )
    for one in found:
        for budget in protocol.budgets:
            _check(one, budget, protocol.lengths)
    return found


def _oracle(protocol: Protocol) -> Contender:
    """Scores of the greedy answer on the full cache; with the question out of view it is told the answer."""
    if protocol.after:
        return Contender("oracle", ORACLE, ToldOracle, {"policy": "oracle", "told": True})

    def make(budget: Budget) -> Evictor:
        return policies.get("oracle", budget=budget, n_tokens=protocol.max_new_tokens)

    return Contender("oracle", ORACLE, make, {"policy": "oracle"})


def policy_of(entry: Json) -> Contender:
    """A policy's entry as a contender, named `adakv(snapkv) window=8` where it has no `label`."""
    entry = dict(entry)
    label, name = entry.pop("label", None), str(entry.pop("name"))
    over = f"({entry['over']})" if "over" in entry else ""
    words = [f"{key}={value}" for key, value in entry.items() if key != "over"]
    label = label or " ".join([f"{name}{over}", *words])

    def make(budget: Budget) -> Evictor:
        return policies.make(name, budget, entry)

    return Contender(str(label), BASELINE, make, {"policy": name, **entry})


def artifact_facts(where: str, artifact: Artifact) -> Json:
    """What the outputs of an artifact follow from: its weights alone do not say how they are used.

    Args:
        where: what it was loaded by; its last part is its name.
        artifact: read from a folder.
    """
    assert artifact.folder is not None
    weights = hashlib.sha256((artifact.folder / MODEL).read_bytes()).hexdigest()
    return {
        "artifact": Path(where).name,
        "method": artifact.method,
        "config": dict(artifact.config),
        "weights": weights,
    }


def _artifact(target: Target, entry: Json, budget: Budget, load: Callable[[str], Artifact]) -> Contender:
    where, label = str(entry.pop("artifact")), entry.pop("label", None)
    artifact = load(where)
    rows: Json = {"budget_tokens": budget.tokens, "budget_ratio": budget.ratio}
    if own := sorted(set(entry) & set(rows)):
        raise ConfigError(
            f"suite.policies entry of artifact {where}: {own[0]}={entry[own[0]]}; every policy runs at the "
            "budgets of the suite: pass suite.budgets=[64,128] and leave it out here"
        )
    takes = set(rows) <= set(methods.get(artifact.method).inference_keys)
    evictor = artifact.attach(target, **rows, **entry).evictor if takes else None
    if evictor is None:
        raise ConfigError(
            f"artifact {where} ({artifact.method}) brings no evictor; the eviction suite needs one"
        )
    assert isinstance(evictor, Scorer)
    words = [f"{key}={value}" for key, value in entry.items()]
    facts = {**artifact_facts(where, artifact), **entry}
    return Contender(str(label or " ".join([Path(where).name, *words])), ARTIFACT, evictor.with_budget, facts)


def _check(one: Contender, budget: Budget, lengths: Sequence[int]) -> None:
    """Refuse a budget with no room for what a policy keeps in any case, before anything is computed."""
    if one.make is None:
        return
    evictor: Any = one.make(budget)
    for length in lengths:
        if budget.of(length) < length:
            check_protected(budget.of(length), getattr(evictor, "least_budget", 1))
