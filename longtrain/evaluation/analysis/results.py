"""`results.json` of a suite: metrics of every system with intervals, and differences from the full cache.

Its content does not depend on times, paths, batch sizes or the order of the records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from longtrain.decoding.stats import Cycle
from longtrain.errors import DataError
from longtrain.evaluation.analysis.acceptance import acceptance_of, position_edges, tau_of
from longtrain.evaluation.analysis.numbers import (
    DRAFTED,
    POSITION,
    Numbers,
    Pair,
    change_of,
    kept_share,
    mean,
    metrics_of,
    numbers_of,
    plain,
    scale_of,
    stretches_of,
)
from longtrain.evaluation.analysis.statistics import (
    USUAL,
    Bootstrap,
    Interval,
    paired_difference,
    pooled_ratio,
)
from longtrain.evaluation.records import Parting, Record, parting
from longtrain.evaluation.suite import DIVERGENCE, Suite, title_and_notes
from longtrain.evaluation.task import Task
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.evaluation.harness.protocol import Protocol

Json = dict[str, Any]
Table = dict[str, dict[str, list[Record]]]
"""System -> task -> records in the order of the task's examples."""
SCHEMA = 2
SHOWN = 10
"""Most differing sequences per task for which the first differing position is reported."""


Judgement = Callable[[System, str, Sequence[Record], Sequence[Parting]], tuple[Json, Sequence[Json]] | None]
"""(system, task, compared records, where they differ) -> (a verdict, metrics of each difference)."""
PLAIN_KINDS = ("pooled", "wilson")
"""Kinds of metrics whose differences between two systems, or two runs, are reported."""
AVERAGE = "average"
"""The task's name in a difference between the averages of two systems."""


def by_example(suite: Suite, systems: Sequence[System], records: Iterable[Record]) -> Table:
    """Records by system and task, in the order of the task's examples.

    Raises:
        DataError: two systems had other prompts.
    """
    prompts: dict[tuple[str, str], Record] = {}
    ids = {task.name: [one.id for one in task.examples()] for task in suite.tasks}
    found: dict[str, dict[str, dict[str, Record]]] = {
        system.name: {name: {} for name in ids} for system in systems
    }
    for record in records:
        found[record.system][record.task][record.example] = record
        first = prompts.setdefault((record.task, record.example), record)
        if first.prompt_sha256 != record.prompt_sha256:
            raise DataError(
                f"task {record.task}, example {record.example}: with system {record.system} it had another "
                f"prompt than with system {first.system} ({record.prompt_sha256} and {first.prompt_sha256}); "
                "remove the run's journals and run again"
            )
    return {
        system: {
            name: [cell[id_] for id_ in ids[name] if id_ in cell] for name, cell in tasks.items() if cell
        }
        for system, tasks in found.items()
    }


def assemble(
    suite: Suite,
    systems: Sequence[System],
    records: Iterable[Record],
    *,
    protocol: Protocol,
    target: Json,
    draw: Bootstrap = USUAL,
    baseline: Json | None = None,
    judge: Judgement | None = None,
) -> Json:
    """Build the content of results.json: everything that is reported except times and texts, as JSON without
    NaN.

    Args:
        suite: the suite that ran.
        systems: the systems that ran, the full cache first.
        records: of all systems, in any order.
        protocol: hash and settings.
        target: `name`, `weights_hash`, `dtype`; `strict` if a draft's output must equal plain decoding's
            exactly; `source` (`TargetInfo.source`) if it is known.
        draw: settings of the bootstrap.
        baseline: how the full cache's score compares with the recorded one.
        judge: classifies differences of drafted sequences as rounding or errors (`harness.lossless`).

    Raises:
        DataError: two systems had other prompts.
    """
    if any(system.drafts for system in systems):
        suite = replace(suite, metrics=(*DRAFTED, *suite.metrics))
    found = by_example(suite, systems, records)
    full = next((system.name for system in systems if system.kind == "full"), None)
    book = _Metrics(suite, found, draw, full=full, strict=bool(target.get("strict")), judge=judge)
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
            "metrics": [asdict(metric) for metric in suite.metrics],
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


class _Metrics:
    """Computes the metrics of one run. A system's records are given as strata: one list for each task, by
    name, so that intervals do not depend on the order of the suite's tasks.
    """

    def __init__(
        self,
        suite: Suite,
        found: Table,
        draw: Bootstrap,
        *,
        full: str | None,
        strict: bool,
        judge: Judgement | None,
    ) -> None:
        self.suite, self.found, self.draw = suite, found, draw
        self.full, self.strict, self.judge = full, strict, judge
        self.reading = scale_of(asdict(suite.scale))
        self.distances = suite.scale.name == DIVERGENCE
        self.known: dict[int, Numbers] = {}
        self.parts: dict[int, list[Record]] = {}
        self.longest = {task.name: task.max_new_tokens for task in suite.tasks if isinstance(task, Task)}

    def system(self, system: System, official: Mapping[str, float]) -> Json:
        """A system's entry in `results["systems"]`."""
        tasks = self.found[system.name]
        strata = [tasks[name] for name in sorted(tasks)]
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
            "average": self._score(strata),
            "acceptance": self._acceptance(strata, edges),
            "metrics": self._own(strata),
            "versus_full": self._versus(strata),
            "facets": self._facets(strata),
        }

    def cells(self, system: System) -> list[Json]:
        """Metrics of every combination of facet values that occurs."""
        entries = []
        for name, some in self.found[system.name].items():
            groups = _grouped(some, lambda record: [tuple(sorted(record.facets.items()))])
            for facets in sorted(groups, key=_rank):
                if facets:
                    place = {"system": system.name, "task": name, "facets": dict(facets)}
                    entries.append(place | self._part([groups[facets]]))
        return entries

    def differences(self, first: str, second: str) -> list[Json]:
        """The differences between two systems for each task, over the same examples.

        Distances from the full cache are also compared by their quotient, for each task and for the averages.
        """
        strata = {task: [self._numbers_of_pairs(some, second)] for task, some in self.found[first].items()}
        if self.distances and len(strata) > 1:
            strata[AVERAGE] = [pairs for name in sorted(strata) for pairs in strata[name]]
        plain = [metric for metric in self.suite.metrics if metric.kind in PLAIN_KINDS]
        entries = []
        for task, some in strata.items():
            every = [pair for pairs in some for pair in pairs]
            mine, other = (self.reading.ratio(pair[side] for pair in every) for side in (0, 1))
            one_task = paired_difference(mine, other, self.draw)
            gap = self.reading.difference(some, self.draw) if task == AVERAGE else one_task
            entry: Json = {"first": first, "second": second, "task": task, "score": verdict(gap)}
            entry["metrics"] = {one.name: change_of(one, every, self.draw).to_json() for one in plain}
            if self.distances:
                entry["quotient"] = self.reading.quotient(some, self.draw).to_json()
            entries.append(entry)
        return entries

    def _task(self, system: System, name: str, some: list[Record]) -> Json:
        edges = position_edges(self.longest.get(name, 1))
        numbers = [self._numbers(record) for record in some]
        return {
            "task": name,
            "rows": len(some),
            "score": self._score([some]),
            "cut": sum(record.cut for record in some),
            "unjudged": sum(self.reading.share(one) is None for one in numbers if "output_tokens" in one),
            **({"out_of_memory": failed} if (failed := sum(bool(one.failed) for one in some)) else {}),
            **{
                key: mean(one.get(key) for one in numbers)
                for key in ("prompt_tokens", "output_tokens", "kept_entries")
            },
            "kept_share": mean(kept_share(record) for record in some),
            "acceptance": self._acceptance([some], edges),
            "exactness": self._exactness(system, name, some),
            "metrics": self._own([some]),
            "versus_full": self._versus([some]),
        }

    def _facets(self, strata: Sequence[Sequence[Record]]) -> list[Json]:
        """Metrics by each facet's values: the mean over the tasks that have the value, and pooled metrics."""
        every = [part for some in strata for record in some for part in (record, *self._stretches(record))]
        groups = _grouped(every, lambda record: record.facets.items())
        return [
            {"facet": facet, "value": value}
            | self._part([*_grouped(groups[facet, value], lambda record: [record.task]).values()])
            for facet, value in sorted(groups, key=_rank)
        ]

    def _part(self, strata: Sequence[Sequence[Record]]) -> Json:
        """The entry of a cell or of a facet's value."""
        rows = _rows(strata)
        return {
            "score": self._score(strata),
            "acceptance": pooled_ratio(tau_of(rows), self.draw).to_json() if rows else None,
            "metrics": self._own(strata),
        }

    def _score(self, strata: Sequence[Sequence[Record]]) -> Json:
        """The mean score over tasks."""
        return self.reading.mean([map(self._numbers, some) for some in strata], self.draw).to_json()

    def _acceptance(self, strata: Sequence[Sequence[Record]], edges: list[int]) -> Json | None:
        rows = _rows(strata)
        return acceptance_of(rows, self.draw, edges=edges) if rows else None

    def _own(self, strata: Sequence[Sequence[Record]]) -> Json:
        """The metrics that the suite reports beside its score."""
        if not self.suite.metrics:
            return {}
        pairs = self._beside_full(strata)
        if pairs is not None:
            return metrics_of(self.suite.metrics, [pair for some in pairs for pair in some], self.draw)
        numbers = [self._numbers(record) for some in strata for record in some]
        return metrics_of(self.suite.metrics, numbers, self.draw)

    def _versus(self, strata: Sequence[Sequence[Record]]) -> Json | None:
        """The mean over tasks of the difference from the full cache, over the same examples.

        None where the score itself is a distance from the full cache.
        """
        pairs = None if self.distances else self._beside_full(strata)
        return None if pairs is None else verdict(self.reading.difference(pairs, self.draw))

    def _exactness(self, system: System, name: str, some: Sequence[Record]) -> Json | None:
        """The number of sequences that differ from the same cache without a draft, and the first positions.

        A sequence is one answer. Later turns of an example whose answer differs had another prompt and are
        not compared. None for tasks that generate nothing.
        """
        if system.lossless_of is None or system.lossless_of not in self.found:
            return None
        pairs = [pair for pair in self._pairs(some, system.lossless_of) if pair[0].turns]
        if not pairs:
            return None
        found = [(a, parting(a, b)) for a, b in pairs]
        partings = [one for _, one in found if one is not None]
        known: Json = {
            "compared": sum(len(a.turns) if one is None else one.turn for a, one in found),
            "different": len(partings),
            "strict": self.strict,
            "violations": len(partings) if self.strict else None,
            "first": [
                {"example": one.first.example, "turn": one.turn, "position": one.position}
                for one in partings[:SHOWN]
            ],
        }
        judged = self.judge(system, name, [a for a, _ in pairs], partings) if self.judge else None
        if judged is None:
            return known
        judgement, metrics = judged
        first = [{**one, **more} for one, more in zip(known["first"], metrics, strict=False)]
        return {**known, **judgement, "first": first}

    def _numbers(self, record: Record) -> Numbers:
        """The numbers of a record, cached."""
        if id(record) not in self.known:
            self.known[id(record)] = numbers_of(record)
        return self.known[id(record)]

    def _stretches(self, record: Record) -> list[Record]:
        """The stretches of a record's sequence, cached."""
        if id(record) not in self.parts:
            self.parts[id(record)] = stretches_of(record)
        return self.parts[id(record)]

    def _pairs(self, some: Sequence[Record], other: str) -> list[tuple[Record, Record]]:
        """Pairs of a task's records (or stretches) with another system's for the same examples, if neither
        failed.
        """
        whole = self.found[other].get(some[0].task, []) if some else []
        there = {_place(part): part for one in whole for part in (one, *self._stretches(one))}
        pairs = [(record, there[_place(record)]) for record in some if _place(record) in there]
        return [(a, b) for a, b in pairs if not (a.failed or b.failed)]

    def _numbers_of_pairs(self, some: Sequence[Record], other: str) -> list[Pair]:
        return [(self._numbers(a), self._numbers(b)) for a, b in self._pairs(some, other)]

    def _beside_full(self, strata: Sequence[Sequence[Record]]) -> list[list[Pair]] | None:
        """Numbers paired with the full cache's, by task; None for the full cache itself, or if it did not
        run.
        """
        system = next((record.system for some in strata for record in some), "")
        if self.full in (None, system):
            return None
        assert self.full is not None
        return [self._numbers_of_pairs(some, self.full) for some in strata]


def verdict(difference: Interval) -> Json:
    """A difference as reported in results.json."""
    return {"difference": difference.to_json(), "larger_than_noise": difference.larger_than_noise}


def _rows(strata: Iterable[Sequence[Record]]) -> list[list[Cycle]]:
    """The draft-verify cycles of every turn; empty if no draft ran."""
    return [row for some in strata for record in some for row in record.rows()]


def _place(record: Record) -> tuple[str, Any]:
    """The key of a record: its example and, for a stretch, the end position."""
    return record.example, record.facets.get(POSITION)


def _grouped(records: Iterable[Record], keys: Callable[[Record], Iterable[Any]]) -> dict[Any, list[Record]]:
    """Group records by key; a record with two keys is in two groups."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        for key in keys(record):
            groups[key].append(record)
    return groups


def _rank(key: Any) -> Any:
    """Sort key for facet values: numbers before strings."""
    if isinstance(key, tuple):
        return tuple(_rank(part) for part in key)
    if isinstance(key, int | float):
        return (0, key, "")
    return (1, 0, str(key))
