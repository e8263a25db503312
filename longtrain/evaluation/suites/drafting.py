"""What suites for drafts share: figures of acceptance, and the length that a prompt is counted under.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from longtrain.decoding.stats import Stats
from longtrain.evaluation.figures.acceptance import ACCEPTANCE
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import ByTask, Scale, Suite, Summary
from longtrain.systems import System

SCALE = Scale(ACCEPTANCE, None, higher_is_better=True)
"""Tokens a forward of the target, its own included: 1 for plain decoding."""


def bucket(n_tokens: int) -> int:
    """The power of two, 1024 or more, that a prompt's length is counted under: the smallest not below it."""
    return max(1024, 1 << (n_tokens - 1).bit_length())


def told(suite: Suite, systems: Sequence[System]) -> Suite:
    """A suite that measures drafts, with notes on what has none: an acceptance length of 1 is no finding.

    Args:
        suite: any; one that measures something else is given back as it is.
        systems: what is run, the full cache first.
    """
    if suite.scale != SCALE:
        return suite
    if not any(system.drafts for system in systems):
        notes = ["no system here has a draft, nothing is measured; pass artifact=DRAFT or method=quantspec"]
    else:
        without = [system.name for system in systems[1:] if not system.drafts]
        notes = [f"{name} has no draft: its acceptance length says nothing here" for name in without]

    def summarise(records: ByTask) -> Summary:
        found = suite.summary(records)
        return replace(found, notes=(*notes, *found.notes))

    return replace(suite, summarise=summarise) if notes else suite


def summary(title: str, records: ByTask, notes: Sequence[str]) -> Summary:
    """Acceptance length of each task and its plain mean; acceptance rates, also by prompt length, beside it.

    Acceptance is pooled over cycles. The rate is QuantSpec's: accepted drafts over drafted levels.

    Args:
        title: what the result is called.
        records: of one system, by task; without a draft there are no figures.
        notes: see `Summary`.
    """
    pooled = {name: _figures(some) for name, some in records.items()}
    tasks = {name: found["tau"] for name, found in pooled.items() if found["tau"] is not None}
    extra = {
        "acceptance": {
            name: found
            | {
                "by_length": {
                    str(length): _figures(inside) for length, inside in _by_length(records[name]).items()
                }
            }
            for name, found in pooled.items()
            if name in tasks
        }
    }
    average = round(fmean(tasks.values()), 4) if tasks else None
    return Summary(title, tuple(notes), tasks, average, extra if tasks else {})


def _figures(some: Sequence[Record]) -> dict[str, Any]:
    stats = Stats(rows=[row for record in some for row in record.rows()])
    cycles = sum(1 for _ in stats.cycles())
    if not cycles:
        return {"tau": None, "acceptance_rate": None, "cycles": 0}
    rate = stats.acceptance_rate
    return {
        "tau": round(stats.tau, 4),
        "acceptance_rate": None if rate != rate else round(rate, 4),
        "cycles": cycles,
    }


def _by_length(some: Sequence[Record]) -> dict[int, list[Record]]:
    lengths = sorted({int(record.facets["length"]) for record in some if "length" in record.facets})
    return {length: [one for one in some if one.facets.get("length") == length] for length in lengths}
