"""Ways of running the target that are compared: the full cache, policies, artifacts, and combinations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from longtrain.decoding.engine import PLAIN
from longtrain.decoding.roles import Parts, TreeShape

Json = dict[str, Any]
FULL, POLICY, ARTIFACT, COMBINED = "full", "policy", "artifact", "combined"


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
            is none or nothing is drafted.
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
