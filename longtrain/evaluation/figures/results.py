"""`results.json` of a suite: figures of every system with intervals, and differences from the full cache.

Nothing in it depends on times, paths, batches or the order that records came in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from longtrain.evaluation.figures.acceptance import acceptance_of, position_edges, tau_of
from longtrain.evaluation.figures.outcomes import (
    Table,
    by_example,
    first_difference,
    kept_share,
    mean,
    numbers_of,
    plain,
)
from longtrain.evaluation.figures.readings import change_of, figures_of, reading_of
from longtrain.evaluation.figures.statistics import (
    USUAL,
    Bootstrap,
    Interval,
    paired_difference,
    paired_mean_difference,
    pooled_ratio,
)
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite, Summary
from longtrain.evaluation.task import Task
from longtrain.systems import System

Json = dict[str, Any]
SCHEMA = 2
SHOWN = 10
"""Texts that differ from plain decoding's of which the places are kept."""


class Hashed(Protocol):
    """A protocol as the harness has it."""

    @property
    def hash(self) -> str:
        """16 hex digits."""

    @property
    def settings(self) -> Json:
        """What was hashed."""


def assemble(
    suite: Suite,
    systems: Sequence[System],
    records: Iterable[Record],
    *,
    protocol: Hashed,
    target: Json,
    draw: Bootstrap = USUAL,
    baseline: Json | None = None,
) -> Json:
    """Everything that is reported but times and texts, as JSON values without NaN.

    Args:
        suite: that ran.
        systems: that ran, the full cache first.
        records: of all systems, in any order.
        protocol: hash and settings.
        target: `name`, `weights_hash`, `dtype`; `strict` where a draft's output may differ in nothing.
        draw: how the bootstrap draws.
        baseline: how the full cache's score compares with the recorded one.

    Raises:
        DataError: a record of an unknown system, task or example, or two of one example.
    """
    found = by_example(suite, systems, records)
    full = next((system.name for system in systems if system.kind == "full"), None)
    book = _Figures(suite, found, draw, full=full, strict=bool(target.get("strict")))
    summaries = {system.name: suite.summary(found[system.name]) for system in systems}
    title, notes = title_and_notes(summaries)
    return plain(
        {
            "schema": SCHEMA,
            "suite": suite.name,
            "title": title,
            "notes": notes,
            "protocol": {"hash": protocol.hash, "settings": protocol.settings},
            "target": target,
            "scale": asdict(suite.scale),
            "figures": [asdict(figure) for figure in suite.figures],
            "bootstrap": asdict(draw),
            "baseline": baseline,
            "systems": [
                book.system(system, summaries[system.name].tasks)
                | {"official_average": summaries[system.name].average, "extra": summaries[system.name].extra}
                for system in systems
            ],
            "cells": [cell for system in systems for cell in book.cells(system)],
            "differences": [one for pair in suite.rivals(systems) for one in book.differences(*pair)],
        }
    )


def title_and_notes(summaries: Mapping[str, Summary]) -> tuple[str, list[str]]:
    """What a result with all these systems may be called, and its notes.

    Where systems have several titles it is the longest, which says what departs from the benchmark.

    Args:
        summaries: by the system's name.
    """
    notes = list(dict.fromkeys(note for summary in summaries.values() for note in summary.notes))
    titles = {summary.title for summary in summaries.values()}
    if len(titles) > 1:
        notes += [f"{name} alone: {summary.title}" for name, summary in summaries.items()]
    return max(sorted(titles), key=len), notes


class _Figures:
    """Figures of one run."""

    def __init__(
        self, suite: Suite, found: Table, draw: Bootstrap, *, full: str | None, strict: bool
    ) -> None:
        self.suite, self.found, self.draw, self.full, self.strict = suite, found, draw, full, strict
        self.reading = reading_of(asdict(suite.scale))
        self.known: dict[int, dict[str, float]] = {}
        self.longest = {task.name: task.max_new_tokens for task in suite.tasks if isinstance(task, Task)}

    def _numbers(self, record: Record) -> dict[str, float]:
        """The numbers of a record, which are made once."""
        if id(record) not in self.known:
            self.known[id(record)] = numbers_of(record)
        return self.known[id(record)]

    def system(self, system: System, official: Mapping[str, float]) -> Json:
        """A system's entry."""
        tasks = self.found[system.name]
        everything = [record for some in tasks.values() for record in some]
        edges = position_edges(max(self.longest.values(), default=1))
        return {
            "name": system.name,
            "kind": system.kind,
            "family": system.family,
            "budget": system.budget,
            "facts": system.facts,
            "tasks": [
                self._task(system, name, some) | {"official": official.get(name)}
                for name, some in tasks.items()
            ],
            "average": self._mean(tasks.values()),
            "acceptance": self._acceptance(everything, edges),
            "figures": self._own(system.name, everything),
            "versus_full": self._versus(system.name, tasks),
            "facets": self._facets(system.name, everything),
        }

    def cells(self, system: System) -> list[Json]:
        """Figures of every combination of facets that occurs."""
        entries = []
        for name, some in self.found[system.name].items():
            for facets, inside in _grouped(some, lambda record: [tuple(sorted(record.facets.items()))]):
                if facets:
                    place = {"system": system.name, "task": name, "facets": dict(facets)}
                    entries.append(place | self._part(system.name, [inside], inside))
        return entries

    def differences(self, first: str, second: str) -> list[Json]:
        """What one system has more than another, task by task over the same examples."""
        entries = []
        for task, some in self.found[first].items():
            both = _paired(some, self.found[second].get(task, []))
            a, b = ([self._numbers(pair[side]) for pair in both] for side in (0, 1))
            score = paired_difference(self.reading.ratio(a), self.reading.ratio(b), self.draw)
            entry = {"first": first, "second": second, "task": task, "score": verdict(score)}
            entry["figures"] = {
                figure.name: change_of(figure, a, b, self.draw).to_json()
                for figure in self.suite.figures
                if figure.kind in ("pooled", "wilson")
            }
            entries.append(entry)
        return entries

    def _task(self, system: System, name: str, some: list[Record]) -> Json:
        edges = position_edges(self.longest.get(name, 1))
        numbers = [self._numbers(record) for record in some]
        return {
            "task": name,
            "rows": len(some),
            "score": self._mean([some]),
            "cut": sum(record.cut for record in some),
            "unjudged": sum(self.reading.share(one) is None for one in numbers if "output_tokens" in one),
            **({"out_of_memory": failed} if (failed := sum(bool(one.failed) for one in some)) else {}),
            **{
                key: mean(one.get(key) for one in numbers)
                for key in ("prompt_tokens", "output_tokens", "kept_rows")
            },
            "kept_share": mean(kept_share(record) for record in some),
            "acceptance": self._acceptance(some, edges),
            "exactness": self._exactness(system, name, some),
            "figures": self._own(system.name, some),
            "versus_full": self._versus(system.name, {name: some}),
        }

    def _facets(self, system: str, everything: Sequence[Record]) -> list[Json]:
        """Figures by one facet at a time: the mean over the tasks that have it, and what is pooled."""
        entries = []
        for (facet, value), inside in _grouped(everything, lambda record: record.facets.items()):
            strata = [same for _, same in _grouped(inside, lambda record: [record.task])]
            entries.append({"facet": facet, "value": value} | self._part(system, strata, inside))
        return entries

    def _part(self, system: str, strata: Iterable[Sequence[Record]], inside: Sequence[Record]) -> Json:
        rows = [row for record in inside for row in record.rows()]
        tau = pooled_ratio(tau_of(rows), self.draw).to_json() if rows else None
        return {"score": self._mean(strata), "acceptance": tau, "figures": self._own(system, inside)}

    def _own(self, system: str, some: Sequence[Record]) -> Json:
        """What the suite reports beside its score."""
        if not self.suite.figures:
            return {}
        full = None
        if self.full not in (None, system):
            pairs = [_paired(inside, self._full(task)) for task, inside in _by_task(some).items()]
            both = [pair for some_pairs in pairs for pair in some_pairs]
            some, full = [a for a, _ in both], [self._numbers(b) for _, b in both]
        return figures_of(self.suite.figures, [self._numbers(one) for one in some], full=full, draw=self.draw)

    def _mean(self, strata: Iterable[Sequence[Record]]) -> Json:
        numbers = [[self._numbers(record) for record in some] for some in strata]
        return self.reading.mean(numbers, self.draw).to_json()

    def _acceptance(self, some: Sequence[Record], edges: list[int]) -> Json | None:
        rows = [row for record in some for row in record.rows()]
        return acceptance_of(rows, self.draw, edges=edges) if rows else None

    def _versus(self, system: str, tasks: Mapping[str, Sequence[Record]]) -> Json | None:
        """The mean over tasks of the difference from the full cache over the same examples."""
        if self.full in (None, system):
            return None
        strata = []
        for name, some in tasks.items():
            pairs = _paired(some, self._full(name))
            first, second = (
                self.reading.ratio(self._numbers(pair[side]) for pair in pairs) for side in (0, 1)
            )
            strata.append((first, second))
        gap = paired_mean_difference(strata, self.draw, of=self.reading.of, bounds=self.reading.bounds)
        return verdict(gap)

    def _full(self, task: str) -> Sequence[Record]:
        assert self.full is not None
        return self.found[self.full].get(task, [])

    def _exactness(self, system: System, name: str, some: Sequence[Record]) -> Json | None:
        """How many answers are not those of the same cache without a draft, and where the first ones part."""
        if system.lossless_of is None or system.lossless_of not in self.found:
            return None
        pairs = _paired(some, self.found[system.lossless_of].get(name, []))
        apart = [
            {"example": a.example, **place} for a, b in pairs if (place := first_difference(a, b)) is not None
        ]
        return {
            "compared": len(pairs),
            "different": len(apart),
            "strict": self.strict,
            "violations": len(apart) if self.strict else None,
            "first": apart[:SHOWN],
        }


def verdict(difference: Interval) -> Json:
    """A difference as it is reported."""
    return {"difference": difference.to_json(), "larger_than_noise": difference.larger_than_noise}


def _paired(some: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Records of two systems in one task, by example, where both have it."""
    there = {record.example: record for record in others}
    pairs = [(record, there[record.example]) for record in some if record.example in there]
    return [(a, b) for a, b in pairs if not (a.failed or b.failed)]


def _by_task(some: Iterable[Record]) -> dict[str, list[Record]]:
    tasks: dict[str, list[Record]] = defaultdict(list)
    for record in some:
        tasks[record.task].append(record)
    return tasks


def _grouped(
    records: Iterable[Record], keys: Callable[[Record], Iterable[Any]]
) -> list[tuple[Any, list[Record]]]:
    """Records by each of their keys, numbers before texts; a record with two keys is in two groups."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        for key in keys(record):
            groups[key].append(record)
    return sorted(groups.items(), key=lambda item: _rank(item[0]))


def _rank(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(_rank(part) for part in key)
    if isinstance(key, int | float):
        return (0, key, "")
    return (1, 0, str(key))
