"""Shared parts of suites that measure drafts: tasks with tokenised prompts, and acceptance summaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from longtrain.decoding.stats import Stats
from longtrain.errors import ConfigError
from longtrain.evaluation.analysis.acceptance import ACCEPTANCE, copied_of
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import ByTask, Scale, Suite, Summary
from longtrain.evaluation.suites import BROUGHT
from longtrain.evaluation.task import Example, Facet, Task
from longtrain.systems import System

ACCEPTANCE_SCALE = Scale(ACCEPTANCE, None, higher_is_better=True)
"""The scale of the acceptance length: tokens per forward pass of the target; 1 for plain decoding."""


def drafted(
    name: str,
    prompts: Sequence[tuple[Example, Sequence[int]]],
    *,
    max_new_tokens: int,
    ignore_eos: bool,
    facets_of: Callable[[Example], dict[str, Facet]],
    protocol: Mapping[str, Any],
    template: str = "{document}",
) -> Task:
    """Make a task of tokenised prompts whose answers are not scored; only their acceptance is measured.

    Args:
        name: the task's name.
        prompts: examples, each with its prompt's token ids.
        max_new_tokens: the maximum number of tokens of an answer.
        ignore_eos: continue past the end-of-text token.
        facets_of: example -> properties by which metrics are split, `length` among them.
        protocol: see `Task`.
        template: description of the prompts, for readers and the protocol.
    """
    known = {row.id: tuple(ids) for row, ids in prompts}
    return Task(
        name,
        tuple(row for row, _ in prompts),
        template,
        max_new_tokens,
        "acceptance",
        None,
        chat=False,
        ignore_eos=ignore_eos,
        protocol=protocol,
        written=lambda row: Encoded(known[row.id]),
        facets_of=facets_of,
    )


def ended(ignore_eos: bool) -> str:
    """The part of a note that states the end condition of answers."""
    return ", the end of text ignored" if ignore_eos else " or fewer where the text ends"


def length_bucket(n_tokens: int) -> int:
    """Round a prompt's length up to a power of two, at least 1024."""
    return max(1024, 1 << (n_tokens - 1).bit_length())


def note_missing_drafts(suite: Suite, systems: Sequence[System]) -> Suite:
    """Add notes on systems without a draft to the suite, since their acceptance length of 1 is no result."""
    if not any(system.drafts for system in systems):
        notes = ["no system here has a draft, nothing is measured; pass artifact=DRAFT or method=quantspec"]
    else:
        without = [system.name for system in systems[1:] if not system.drafts]
        notes = [f"{name} has no draft: its acceptance length has no meaning here" for name in without]
    return replace(suite, notes=(*notes, *suite.notes))


def acceptance_summary(records: ByTask) -> Summary:
    """Acceptance length of each task and its plain mean; acceptance rates, also by prompt length, as extra
    values.

    Acceptance is pooled over cycles. The rate is QuantSpec's: accepted tokens over drafted tree levels.

    Args:
        records: records of one system, by task; without a draft the summary is empty.
    """
    pooled = {name: _acceptance_of(some) for name, some in records.items()}
    tasks = {name: found["tau"] for name, found in pooled.items() if found["tau"] is not None}
    acceptance = {}
    for name in tasks:
        lengths = _by_length(records[name]).items()
        by_length = {str(length): _acceptance_of(inside) for length, inside in lengths}
        acceptance[name] = pooled[name] | {"by_length": by_length}
    average = round(fmean(tasks.values()), 4) if tasks else None
    return Summary(tasks=tasks, average=average, extra={"acceptance": acceptance} if tasks else {})


def first_and_others(systems: Sequence[System]) -> list[tuple[str, str]]:
    """Pairs of the first drafting system with each of the other drafting systems."""
    first, *others = [system.name for system in systems if system.drafts]
    return [(first, other) for other in others]


def needs_a_draft(suite: Suite, systems: Sequence[System]) -> Suite:
    """Like `note_missing_drafts`, but refuse a run without any draft.

    Raises:
        ConfigError: no system has a draft.
    """
    if any(system.drafts for system in systems):
        return note_missing_drafts(suite, systems)
    if len(systems) < 2:
        raise ConfigError(BROUGHT[suite.name])
    raise ConfigError(
        f"{systems[1].name} brings no draft, and suite={suite.name} measures drafts; put a draft beside it "
        "(suite.systems=[{artifact: [DRAFT, EVICTOR]}]), or pass suite=longbench, ruler or needle"
    )


def _acceptance_of(some: Sequence[Record]) -> dict[str, Any]:
    stats = Stats(rows=[row for record in some for row in record.rows()])
    cycles = sum(1 for _ in stats.cycles())
    if not cycles:
        return {"tau": None, "acceptance_rate": None, "cycles": 0}
    rate = stats.acceptance_rate
    return {
        "tau": round(stats.tau, 4),
        "acceptance_rate": None if rate != rate else round(rate, 4),
        "cycles": cycles,
        **copied_of(stats),
    }


def _by_length(some: Sequence[Record]) -> dict[int, list[Record]]:
    lengths = sorted({int(record.facets["length"]) for record in some if "length" in record.facets})
    return {length: [one for one in some if one.facets.get("length") == length] for length in lengths}
