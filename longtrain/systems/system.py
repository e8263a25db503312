"""One way of running the target, and which other way must give the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from longtrain import methods
from longtrain.decoding.engine import PLAIN
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape

Json = dict[str, Any]
EVICTOR, DRAFT = "evictor", "draft"
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
        budget: rows kept, as typed: `128` or `10%`; None where nothing is evicted.
        parts: draft, evictor and cache for an engine.
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


FULL_CACHE = System("full", FULL, "full")


def shape_name(shape: TreeShape) -> str:
    """`chain 4` or `tree 4-8-8`."""
    if set(shape.widths) == {1}:
        return f"chain {shape.depth}"
    return f"tree {'-'.join(str(width) for width in shape.widths)}"


def budget_label(budget: Budget) -> str:
    """`128` rows, or `10%` of the prompt."""
    return str(budget.tokens) if budget.ratio is None else f"{100 * budget.ratio:g}%"


def without_draft(system: System, systems: Sequence[System]) -> str | None:
    """The system whose texts a draft must repeat: the same cache, the same evictor and budget, and no draft.

    None where there is none, or where a cache's own settings allow the texts to differ.
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
    if named := system.facts.get("cache"):
        if named["name"] != "int8":
            return dict(named)
        values = {"name": "quantspec", "split": named["split"]}  # the cache that this method brings
    else:
        values = dict(system.facts["method"])
    spec = methods.get(values.pop("name"))
    law = None if spec.cache_law is None else spec.cache_law(spec.config(**values))
    return None if law is None else {"name": spec.name, **law}


def _eviction(system: System) -> Json:
    """What a system's evictor is made of."""
    facts = system.facts
    if "artifacts" not in facts:
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
