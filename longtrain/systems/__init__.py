"""Ways of running the target: what one is, how it is written in a configuration, and how it is made."""

from __future__ import annotations

from longtrain.systems.build import Builder
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
]
