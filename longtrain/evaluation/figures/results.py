"""`results.json` of a suite: figures of every system with intervals, and differences from the full cache.

Nothing in it depends on times, paths, batches or the order that records came in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longtrain.decoding.stats import Cycle
from longtrain.evaluation.figures.acceptance import acceptance_of, position_edges, tau_of
from longtrain.evaluation.figures.outcomes import (
    POSITION,
    Numbers,
    Pair,
    Parting,
    Table,
    by_example,
    change_of,
    figures_of,
    kept_share,
    mean,
    numbers_of,
    parting,
    plain,
    reading_of,
    stretches_of,
)
from longtrain.evaluation.figures.statistics import (
    USUAL,
    Bootstrap,
    Interval,
    paired_difference,
    pooled_ratio,
)
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite, Summary
from longtrain.evaluation.task import Task
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.evaluation.harness.protocol import Protocol

Json = dict[str, Any]
SCHEMA = 2
SHOWN = 10
"""Texts that differ from plain decoding's of which the places are kept."""
Judgement = Callable[[System, str, Sequence[Record], Sequence[Parting]], tuple[Json, Sequence[Json]] | None]
"""(system, task, records that were compared, where they part) -> what that is worth, and figures of each."""
PLAIN_KINDS = ("pooled", "wilson")
"""Kinds of figures whose differences between two systems, or two runs, are reported."""


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
    """Everything that is reported but times and texts, as JSON values without NaN.

    Args:
        suite: that ran.
        systems: that ran, the full cache first.
        records: of all systems, in any order.
        protocol: hash and settings.
        target: `name`, `weights_hash`, `dtype`; `strict` where a draft's output may differ in nothing;
            `source` (`TargetInfo.source`) where it is known.
        draw: how the bootstrap draws.
        baseline: how the full cache's score compares with the recorded one.
        judge: says what differences of drafted texts are worth (`harness.lossless`).

    Raises:
        DataError: a record of an unknown system, task or example, or two of one example.
    """
    found = by_example(suite, systems, records)
    full = next((system.name for system in systems if system.kind == "full"), None)
    book = _Figures(suite, found, draw, full=full, strict=bool(target.get("strict")), judge=judge)
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


def unsolved(suite: Suite, results: Json) -> list[str]:
    """What is to be said where the full cache itself scores below half: such a table separates nothing.

    Args:
        suite: that ran; one that is not `solvable` is let be.
        results: of `assemble`, the full cache first.

    Returns: at most one note, which names the kinds of questions, or the tasks, that are below half.
    """
    full, best = results["systems"][0], results["scale"]["maximum"]
    if not suite.solvable or full["kind"] != "full" or best is None:
        return []
    kinds = [(str(one["value"]), one["score"]) for one in full["facets"] if one["facet"] == "task"]
    parts = kinds or [(one["task"], one["score"]) for one in full["tasks"]]
    low = {name: score["value"] for name, score in parts if (score["value"] or 0.0) < best / 2}
    mean = full["average"]["value"] or 0.0
    if not low and mean >= best / 2:
        return []
    named = ", ".join(f"{name} {value or 0.0:.3g}" for name, value in low.items())
    where = f" in {named}" if low else ""
    return [
        f"the full cache scores below half{where} (average {mean:.3g} of {best:.3g}): what other "
        "systems score there separates nothing; take shorter lengths, other tasks or another target"
    ]


class _Figures:
    """Figures of one run. Records of a system come as strata: those of each task, in the suite's order."""

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
        self.reading = reading_of(asdict(suite.scale))
        self.known: dict[int, Numbers] = {}
        self.parts: dict[int, list[Record]] = {}
        self.longest = {task.name: task.max_new_tokens for task in suite.tasks if isinstance(task, Task)}

    def system(self, system: System, official: Mapping[str, float]) -> Json:
        """A system's entry."""
        tasks = self.found[system.name]
        strata = list(tasks.values())
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
            "figures": self._own(strata),
            "versus_full": self._versus(strata),
            "facets": self._facets(strata),
        }

    def cells(self, system: System) -> list[Json]:
        """Figures of every combination of facets that occurs."""
        entries = []
        for name, some in self.found[system.name].items():
            groups = _grouped(some, lambda record: [tuple(sorted(record.facets.items()))])
            for facets in sorted(groups, key=_rank):
                if facets:
                    place = {"system": system.name, "task": name, "facets": dict(facets)}
                    entries.append(place | self._part([groups[facets]]))
        return entries

    def differences(self, first: str, second: str) -> list[Json]:
        """What one system has more than another, task by task over the same examples."""
        entries = []
        plain = [figure for figure in self.suite.figures if figure.kind in PLAIN_KINDS]
        for task, some in self.found[first].items():
            pairs = self._numbers_of_pairs(some, second)
            mine, other = (self.reading.ratio(pair[side] for pair in pairs) for side in (0, 1))
            entry: Json = {"first": first, "second": second, "task": task}
            entry["score"] = verdict(paired_difference(mine, other, self.draw))
            entry["figures"] = {one.name: change_of(one, pairs, self.draw).to_json() for one in plain}
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
                for key in ("prompt_tokens", "output_tokens", "kept_rows")
            },
            "kept_share": mean(kept_share(record) for record in some),
            "acceptance": self._acceptance([some], edges),
            "exactness": self._exactness(system, name, some),
            "figures": self._own([some]),
            "versus_full": self._versus([some]),
        }

    def _facets(self, strata: Sequence[Sequence[Record]]) -> list[Json]:
        """Figures by one facet at a time: the mean over the tasks that have it, and what is pooled."""
        every = [part for some in strata for record in some for part in (record, *self._stretches(record))]
        groups = _grouped(every, lambda record: record.facets.items())
        return [
            {"facet": facet, "value": value} | self._part(_by_task(groups[facet, value]))
            for facet, value in sorted(groups, key=_rank)
        ]

    def _part(self, strata: Sequence[Sequence[Record]]) -> Json:
        """A cell's entry, or a facet's; tasks are drawn in the order of their names there."""
        rows = _rows(strata)
        return {
            "score": self._score(sorted(strata, key=lambda some: some[0].task)),
            "acceptance": pooled_ratio(tau_of(rows), self.draw).to_json() if rows else None,
            "figures": self._own(strata),
        }

    def _score(self, strata: Sequence[Sequence[Record]]) -> Json:
        """The mean over tasks."""
        return self.reading.mean([map(self._numbers, some) for some in strata], self.draw).to_json()

    def _acceptance(self, strata: Sequence[Sequence[Record]], edges: list[int]) -> Json | None:
        rows = _rows(strata)
        return acceptance_of(rows, self.draw, edges=edges) if rows else None

    def _own(self, strata: Sequence[Sequence[Record]]) -> Json:
        """What the suite reports beside its score."""
        if not self.suite.figures:
            return {}
        pairs = self._beside_full(strata)
        if pairs is not None:
            return figures_of(self.suite.figures, [pair for some in pairs for pair in some], self.draw)
        numbers = [self._numbers(record) for some in strata for record in some]
        return figures_of(self.suite.figures, numbers, self.draw)

    def _versus(self, strata: Sequence[Sequence[Record]]) -> Json | None:
        """The mean over tasks of the difference from the full cache over the same examples."""
        pairs = self._beside_full(strata)
        return None if pairs is None else verdict(self.reading.difference(pairs, self.draw))

    def _exactness(self, system: System, name: str, some: Sequence[Record]) -> Json | None:
        """How many texts are not those of the same cache without a draft, and where the first ones part.

        A text is one answer. Those after the first that differs, in later turns, had another prompt and are
        not compared. None where no text was written: measured tasks have nothing to compare.
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
        said, figures = judged
        first = [{**one, **more} for one, more in zip(known["first"], figures, strict=False)]
        return {**known, **said, "first": first}

    def _numbers(self, record: Record) -> Numbers:
        """The numbers of a record, which are made once."""
        if id(record) not in self.known:
            self.known[id(record)] = numbers_of(record)
        return self.known[id(record)]

    def _stretches(self, record: Record) -> list[Record]:
        """Stretches of a record's text, which are made once."""
        if id(record) not in self.parts:
            self.parts[id(record)] = stretches_of(record)
        return self.parts[id(record)]

    def _pairs(self, some: Sequence[Record], other: str) -> list[tuple[Record, Record]]:
        """Records of a task, or stretches of them, with another system's of the same examples, where neither
        failed.
        """
        whole = self.found[other].get(some[0].task, []) if some else []
        there = {_place(part): part for one in whole for part in (one, *self._stretches(one))}
        pairs = [(record, there[_place(record)]) for record in some if _place(record) in there]
        return [(a, b) for a, b in pairs if not (a.failed or b.failed)]

    def _numbers_of_pairs(self, some: Sequence[Record], other: str) -> list[Pair]:
        return [(self._numbers(a), self._numbers(b)) for a, b in self._pairs(some, other)]

    def _beside_full(self, strata: Sequence[Sequence[Record]]) -> list[list[Pair]] | None:
        """Numbers beside the full cache's, by task; None for itself, and where it did not run."""
        system = next((record.system for some in strata for record in some), "")
        if self.full in (None, system):
            return None
        assert self.full is not None
        return [self._numbers_of_pairs(some, self.full) for some in strata]


def verdict(difference: Interval) -> Json:
    """A difference as it is reported."""
    return {"difference": difference.to_json(), "larger_than_noise": difference.larger_than_noise}


def _rows(strata: Iterable[Sequence[Record]]) -> list[list[Cycle]]:
    """The cycles of every turn; empty where no draft ran."""
    return [row for some in strata for record in some for row in record.rows()]


def _place(record: Record) -> tuple[str, Any]:
    """The example, and the stretch of its text."""
    return record.example, record.facets.get(POSITION)


def _by_task(some: Iterable[Record]) -> list[list[Record]]:
    return list(_grouped(some, lambda record: [record.task]).values())


def _grouped(records: Iterable[Record], keys: Callable[[Record], Iterable[Any]]) -> dict[Any, list[Record]]:
    """Records by each of their keys; a record with two keys is in two groups."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        for key in keys(record):
            groups[key].append(record)
    return groups


def _rank(key: Any) -> Any:
    """Keys in order: numbers before texts."""
    if isinstance(key, tuple):
        return tuple(_rank(part) for part in key)
    if isinstance(key, int | float):
        return (0, key, "")
    return (1, 0, str(key))
