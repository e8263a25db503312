"""`results.json` of a suite: figures of every system with intervals, and differences from the full cache.

Nothing in it depends on times, paths, batches or the order that records came in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from longtrain.evaluation.collate import (
    Table,
    by_example,
    cycles_of,
    kept_rows,
    kept_share,
    mean,
    parting,
    plain,
)
from longtrain.evaluation.excerpts import examples
from longtrain.evaluation.records import Record
from longtrain.evaluation.scores import ACCEPTANCE, acceptance_of, position_edges, tau_of
from longtrain.evaluation.statistics import (
    CONFIDENCE,
    RESAMPLES,
    Figure,
    Interval,
    mean_of_ratios,
    paired_mean_difference,
    pooled_ratio,
)
from longtrain.evaluation.suite import Suite, Summary
from longtrain.evaluation.systems import System
from longtrain.evaluation.task import Task

__all__ = ["assemble", "examples", "reading_of", "verdict", "versus"]

Json = dict[str, Any]
Share = tuple[float, float]
SCHEMA = 1
LONG_OUTPUT = 256
"""Tokens from which the generated text is cut into `FINE` parts, not the usual few."""
FINE = 8


class Hashed(Protocol):
    """A protocol as the harness has it."""

    @property
    def hash(self) -> str:
        """16 hex digits."""

    @property
    def settings(self) -> Json:
        """What was hashed."""


@dataclass(frozen=True)
class Reading:
    """How an outcome gives its share of a figure.

    Args:
        share: (score, measures, tokens and cycles of a draft) -> (numerator, denominator); None where there
            is no figure.
        of: of the ratio of sums, elementwise.
        bounds: the least and the most that the figure can be.
    """

    share: Callable[[float | None, Mapping[str, float] | None, Sequence[float] | None], Share | None]
    of: Callable[[Any], Any] = np.asarray
    bounds: tuple[float, float] = (0.0, math.inf)

    def of_record(self, record: Record) -> Share | None:
        """A record's share."""
        return self.share(record.score, record.measures, cycles_of(record))

    def figure(self, records: Iterable[Record]) -> Figure:
        """Shares of records; one without a figure has the denominator 0 and counts for nothing."""
        shares = [self.of_record(record) or (0.0, 0.0) for record in records]
        return [above for above, _ in shares], [below for _, below in shares]


def reading_of(name: str, maximum: float | None) -> Reading:
    """How figures are read: `maximum` times the mean score, exp(Σ nats / Σ tokens), or tokens a cycle.

    Args:
        name: of the suite's scale.
        maximum: of the suite's scale.
    """
    if name == "perplexity":
        return Reading(
            lambda score, found, cycles: (found["nats"], found["tokens"]) if found else None,
            np.exp,
            (1.0, math.inf),
        )
    if name == ACCEPTANCE:  # plain decoding gives one token a cycle
        return Reading(lambda score, found, cycles: (1.0, 1.0) if cycles is None else (cycles[0], cycles[1]))
    best = 1.0 if maximum is None else maximum
    return Reading(
        lambda score, found, cycles: None if score is None else (best * score, 1.0),
        bounds=(0.0, math.inf if maximum is None else maximum),
    )


def assemble(
    suite: Suite,
    systems: Sequence[System],
    records: Iterable[Record],
    *,
    protocol: Hashed,
    target: Json,
    seed: int = 0,
    resamples: int = RESAMPLES,
    baseline: Json | None = None,
) -> Json:
    """Everything that is reported but times and texts, as JSON values without NaN.

    Args:
        suite: that ran.
        systems: that ran, the full cache first.
        records: of all systems, in any order.
        protocol: hash and settings.
        target: `name`, `weights_hash`, `dtype`; `strict` where a draft's output may differ in nothing.
        seed: of the bootstrap.
        resamples: bootstrap replicates.
        baseline: how the full cache's score compares with the recorded one.

    Raises:
        DataError: a record of an unknown system, task or example, or two of one example.
    """
    found = by_example(suite, systems, records)
    book = _Book(suite, found, Draw(seed, resamples), strict=bool(target.get("strict")))
    full = next((system.name for system in systems if system.kind == "full"), None)
    summaries = {system.name: suite.summary(found[system.name]) for system in systems}
    title, notes = called(summaries)
    return plain(
        {
            "schema": SCHEMA,
            "suite": suite.name,
            "title": title,
            "notes": notes,
            "protocol": {"hash": protocol.hash, "settings": protocol.settings},
            "target": target,
            "scale": {
                "name": suite.scale.name,
                "maximum": suite.scale.maximum,
                "higher_is_better": suite.scale.higher_is_better,
            },
            "bootstrap": {"resamples": resamples, "confidence": CONFIDENCE, "seed": seed},
            "baseline": baseline,
            "systems": [
                book.system(system, full, summaries[system.name].tasks)
                | {"official_average": summaries[system.name].average, "extra": summaries[system.name].extra}
                for system in systems
            ],
            "cells": [cell for system in systems for cell in book.cells(system)],
        }
    )


def called(summaries: Mapping[str, Summary]) -> tuple[str, list[str]]:
    """What a result with all these systems may be called, and its notes.

    Where systems have several titles it is the longest, which says what departs from the benchmark.

    Args:
        summaries: of each system by name.
    """
    notes = list(dict.fromkeys(note for summary in summaries.values() for note in summary.notes))
    titles = {summary.title for summary in summaries.values()}
    if len(titles) > 1:
        notes += [f"{name} alone: {summary.title}" for name, summary in summaries.items()]
    return max(sorted(titles), key=len), notes


@dataclass(frozen=True)
class Draw:
    """How the bootstrap draws."""

    seed: int = 0
    resamples: int = RESAMPLES

    def words(self) -> Any:
        """As keywords of `statistics`."""
        return {"seed": self.seed, "resamples": self.resamples}


class _Book:
    """Figures of one run."""

    def __init__(self, suite: Suite, found: Table, draw: Draw, *, strict: bool) -> None:
        self.suite, self.found, self.draw, self.strict = suite, found, draw, strict
        self.reading = reading_of(suite.scale.name, suite.scale.maximum)
        self.longest = {task.name: task.max_new_tokens for task in suite.tasks if isinstance(task, Task)}

    def system(self, system: System, full: str | None, official: Mapping[str, float]) -> Json:
        """A system's entry."""
        tasks = self.found[system.name]
        against = self.found[full] if full is not None and system.name != full else None
        edges = edges_of(max(self.longest.values(), default=1))
        return {
            "name": system.name,
            "kind": system.kind,
            "family": system.family,
            "budget": system.budget,
            "facts": system.facts,
            "tasks": [
                self._task(system, name, some, against) | {"official": official.get(name)}
                for name, some in tasks.items()
            ],
            "average": self._mean(tasks.values()),
            "acceptance": self._acceptance([r for some in tasks.values() for r in some], edges),
            "versus_full": None if against is None else versus(tasks, against, self.reading, self.draw),
            "facets": self._facets(tasks),
        }

    def cells(self, system: System) -> list[Json]:
        """Figures of every combination of facets that occurs."""
        entries = []
        for name, some in self.found[system.name].items():
            for facets, inside in _grouped(some, lambda record: [tuple(sorted(record.facets.items()))]):
                if facets:
                    figures = {"score": self._mean([inside]), "acceptance": self._tau(inside)}
                    entries.append({"system": system.name, "task": name, "facets": dict(facets), **figures})
        return entries

    def _task(self, system: System, name: str, some: list[Record], against: Any) -> Json:
        edges = edges_of(self.longest.get(name, 1))
        read = [record for record in some if record.turns]
        return {
            "task": name,
            "rows": len(some),
            "score": self._mean([some]),
            "cut": sum(record.cut for record in some),
            "unjudged": sum(self.reading.of_record(record) is None for record in some),
            "prompt_tokens": mean(record.prompt_tokens for record in read),
            "output_tokens": mean(record.output_tokens for record in read),
            "kept_rows": mean(kept_rows(record) for record in some),
            "kept_share": mean(kept_share(record) for record in some),
            "acceptance": self._acceptance(some, edges),
            "exactness": self._exactness(system, name, some),
            "versus_full": None
            if against is None
            else versus({name: some}, {name: against.get(name, [])}, self.reading, self.draw),
        }

    def _facets(self, tasks: Mapping[str, list[Record]]) -> list[Json]:
        """Figures by one facet at a time: the mean over the tasks that have it, and the pooled acceptance."""
        everything = [record for some in tasks.values() for record in some]
        entries = []
        for (facet, value), inside in _grouped(everything, lambda record: record.facets.items()):
            strata = [same for _, same in _grouped(inside, lambda record: [record.task])]
            figures = {"score": self._mean(strata), "acceptance": self._tau(inside)}
            entries.append({"facet": facet, "value": value, **figures})
        return entries

    def _mean(self, strata: Iterable[Sequence[Record]]) -> Json:
        figures = [self.reading.figure(some) for some in strata]
        words = self.draw.words()
        return mean_of_ratios(figures, of=self.reading.of, bounds=self.reading.bounds, **words).to_json()

    def _tau(self, some: Sequence[Record]) -> Json | None:
        rows = [row for record in some for row in record.rows()]
        return pooled_ratio(*tau_of(rows), **self.draw.words()).to_json() if rows else None

    def _acceptance(self, some: Sequence[Record], edges: list[int]) -> Json | None:
        rows = [row for record in some for row in record.rows()]
        return acceptance_of(rows, **self.draw.words(), positions=edges) if rows else None

    def _exactness(self, system: System, name: str, some: Sequence[Record]) -> Json | None:
        """How many answers are not those of the same cache without a draft, and where the first ones part."""
        if system.lossless_of is None or system.lossless_of not in self.found:
            return None
        plain_ = {record.example: record for record in self.found[system.lossless_of].get(name, [])}
        pairs = [(record, plain_[record.example]) for record in some if record.example in plain_]
        apart = [{"example": a.example, **place} for a, b in pairs if (place := parting(a, b)) is not None]
        return {
            "compared": len(pairs),
            "different": len(apart),
            "strict": self.strict,
            "violations": len(apart) if self.strict else None,
            "first": apart[:10],
        }


def versus(
    tasks: Mapping[str, Sequence[Record]],
    others: Mapping[str, Sequence[Record]],
    reading: Reading,
    draw: Draw,
) -> Json:
    """The mean over tasks of the difference over the same examples, and whether it is larger than noise.

    Args:
        tasks: records by task.
        others: what is taken away.
        reading: of the records.
        draw: of the bootstrap.
    """
    strata = []
    for name, some in tasks.items():
        there = {record.example: record for record in others.get(name, [])}
        pairs = [(record, there[record.example]) for record in some if record.example in there]
        strata.append((reading.figure(a for a, _ in pairs), reading.figure(b for _, b in pairs)))
    return verdict(paired_mean_difference(strata, of=reading.of, bounds=reading.bounds, **draw.words()))


def verdict(difference: Interval) -> Json:
    """A difference as it is reported."""
    return {"difference": difference.to_json(), "larger_than_noise": difference.larger_than_noise}


def edges_of(max_new_tokens: int) -> list[int]:
    """Bounds in generated tokens that acceptance is split by."""
    if max_new_tokens >= LONG_OUTPUT:
        return position_edges(max_new_tokens, FINE)
    return position_edges(max_new_tokens)


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
