"""Systems: ways of running the target that are compared, as read from a configuration and built from it."""

from __future__ import annotations

from longtrain.systems.build import Builder, with_lookup
from longtrain.systems.system import (
    DRAFT,
    EVICTOR,
    FULL_CACHE,
    SELECTOR,
    Entry,
    System,
    budget_label,
    parse,
    shape_name,
)

__all__ = [
    "DRAFT",
    "EVICTOR",
    "FULL_CACHE",
    "SELECTOR",
    "Builder",
    "Entry",
    "System",
    "budget_label",
    "parse",
    "shape_name",
    "with_lookup",
]
