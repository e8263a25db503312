"""What suites that measure drafts share: prompts in tokens, the acceptance of drafts, what has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from longtrain.decoding.stats import Stats
from longtrain.errors import ConfigError
from longtrain.evaluation.figures.acceptance import ACCEPTANCE
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import ByTask, Scale, Suite, Summary
from longtrain.evaluation.suites import BROUGHT
from longtrain.evaluation.task import Example, Facet, Task
from longtrain.systems import System

ACCEPTANCE_SCALE = Scale(ACCEPTANCE, None, higher_is_better=True)
"""Tokens a forward of the target, its own included: 1 for plain decoding."""


def drafted(
    name: str,
    prompts: Sequence[tuple[Example, Sequence[int]]],
    *,
    max_new_tokens: int,
    ignore_eos: bool,
    facets_of: Callable[[Example], dict[str, Facet]],
    protocol: Mapping[str, Any],
    template: str = "{document}",
    chat: bool = False,
) -> Task:
    """A task of prompts in tokens whose answers are not scored: what matters is how they are drafted.

    Args:
        name: of the task.
        prompts: rows, each with its prompt.
        max_new_tokens: most tokens of an answer.
        ignore_eos: go on past the end of text.
        facets_of: row -> what figures are split by, `length` among it.
        protocol: see `Task`.
        template: what prompts are, for readers and the protocol.
        chat: whether the prompts are in the chat template.
    """
    known = {row.id: tuple(ids) for row, ids in prompts}
    return Task(
        name,
        tuple(row for row, _ in prompts),
        template,
        max_new_tokens,
        "acceptance",
        None,
        chat=chat,
        ignore_eos=ignore_eos,
        protocol=protocol,
        written=lambda row: Encoded(known[row.id]),
        facets_of=facets_of,
    )


def ended(ignore_eos: bool) -> str:
    """What ends answers, for notes."""
    return ", the end of text ignored" if ignore_eos else " or fewer where the text ends"


def length_bucket(n_tokens: int) -> int:
    """The power of two, 1024 or more, that a prompt's length is counted under: the smallest not below it."""
    return max(1024, 1 << (n_tokens - 1).bit_length())


def tell_of_drafts(suite: Suite, systems: Sequence[System]) -> Suite:
    """The suite with notes on what has no draft: an acceptance length of 1 is no finding."""
    if not any(system.drafts for system in systems):
        notes = ["no system here has a draft, nothing is measured; pass artifact=DRAFT or method=quantspec"]
    else:
        without = [system.name for system in systems[1:] if not system.drafts]
        notes = [f"{name} has no draft: its acceptance length says nothing here" for name in without]
    return replace(suite, notes=(*notes, *suite.notes))


def acceptance_summary(records: ByTask) -> Summary:
    """Acceptance length of each task and its plain mean; acceptance rates, also by prompt length, beside it.

    Acceptance is pooled over cycles. The rate is QuantSpec's: accepted drafts over drafted levels.

    Args:
        records: of one system, by task; without a draft there are no figures.
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
    """The first system that drafts with each of the others that do."""
    first, *others = [system.name for system in systems if system.drafts]
    return [(first, other) for other in others]


def needs_a_draft(suite: Suite, systems: Sequence[System]) -> Suite:
    """As `tell_of_drafts`, and refuse a run in which nothing drafts.

    Raises:
        ConfigError: nothing drafts.
    """
    if any(system.drafts for system in systems):
        return tell_of_drafts(suite, systems)
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
    }


def _by_length(some: Sequence[Record]) -> dict[int, list[Record]]:
    lengths = sorted({int(record.facets["length"]) for record in some if "length" in record.facets})
    return {length: [one for one in some if one.facets.get("length") == length] for length in lengths}
