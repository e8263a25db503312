"""A suite: tasks that are run together, the scale of their figures, and what the result may be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.records import Record
from longtrain.evaluation.task import Measured, Task
from longtrain.systems import DRAFT, EVICTOR, SELECTOR, Builder, System

Json = dict[str, Any]
Advance = Callable[[str, int], None]
"""Called with (what is running, how many are done since the last call)."""


AGREEMENT = "agreement"
"""Scale of suites that ask whether systems do as the full cache does."""


@dataclass(frozen=True)
class Scale:
    """What a suite's figures are.

    Args:
        name: `score`, `perplexity`.
        maximum: the best that can be; None: there is none.
        higher_is_better: which way is up.
    """

    name: str = "score"
    maximum: float | None = 100.0
    higher_is_better: bool = True


@dataclass(frozen=True)
class Figure:
    """A figure that a suite reports beside its score, made of named numbers of the records.

    It is the sum of one number over that of another (`figures.outcomes.numbers_of` has the names), reported
    of every system, task, facet and cell; records without these numbers do not count.

    Args:
        name: in results and as the heading of tables.
        above: the number that is summed.
        below: the number that this is divided by.
        kind: `mean`: the value alone; `pooled`: with a bootstrap interval; `wilson`: with Wilson's, where
            each record is a yes or no; `change`: minus the full cache's over the same examples; `quotient`:
            the sum over that of the full cache.
        unit: `number`, `percent` (of a share) or `bytes`.
        growth: whether it is a logarithm, such as nats a token: told as its exponential, and a change as
            growth in percent.
        plotted: whether it is drawn by context length, or by position in a text.
    """

    name: str
    above: str
    below: str = "one"
    kind: Literal["mean", "pooled", "wilson", "change", "quotient"] = "pooled"
    unit: Literal["number", "percent", "bytes"] = "number"
    growth: bool = False
    plotted: bool = False


@dataclass(frozen=True)
class Summary:
    """A benchmark's own figures of one system.

    Args:
        title: what the result may be called; empty: what the suite says (`Suite.summary`).
        notes: what is to be said beside the figures, every departure from the whole benchmark first.
        tasks: task -> its figure, rounded as the benchmark rounds; tasks without one are missing.
        average: the benchmark's own average; None where there is none.
        extra: further JSON values for the result.
        departures: those that only the records tell; with any the result is a variant.
    """

    title: str = ""
    notes: tuple[str, ...] = ()
    tasks: Mapping[str, float] = field(default_factory=dict)
    average: float | None = None
    extra: Json = field(default_factory=dict)
    departures: tuple[str, ...] = ()


ByTask = Mapping[str, Sequence[Record]]
"""Records of one system, by task."""


@dataclass(frozen=True)
class Suite:
    """What `longtrain eval suite=NAME` runs.

    Args:
        name: of the suite.
        tasks: at least one, names differ.
        scale: of the figures.
        summarise: the benchmark's own figures.
        title: what a result without departures is called; empty: the name.
        departures: what makes a result a variant of the benchmark; see `evaluation/published.py`.
        notes: what is to be said of every result, and leaves the title as it is.
        cuts: whether the benchmark itself cuts prompts that are too long; else a cut prompt is a departure.
        needs: roles that a system may bring: an evictor, a draft, a selector, or some of them.
        settings: further JSON values of the suite to be hashed.
        figures: what is reported beside the score.
        solvable: whether every prompt has an answer that a good target gives, so that a full cache below half
            the scale says that the table separates nothing.
        full_cache: whether the target is run with its full cache and without a draft too.
        rivals: systems that ran -> pairs of names; their differences over the same examples are reported.
        own_systems: makes systems that the suite itself brings, such as an upper bound.
        meet: is given the suite and the systems before anything runs; may refuse them, and gives back the
            suite that is run, with notes on them say.
    """

    name: str
    tasks: tuple[Task | Measured, ...]
    scale: Scale = Scale()
    summarise: Callable[[ByTask], Summary] = lambda records: mean_summary(records)
    title: str = ""
    departures: Sequence[str] = ()
    notes: Sequence[str] = ()
    cuts: bool = False
    needs: frozenset[str] = frozenset({EVICTOR, DRAFT, SELECTOR})
    settings: Json = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    solvable: bool = False
    full_cache: bool = True
    rivals: Callable[[Sequence[System]], Sequence[tuple[str, str]]] = lambda systems: ()
    own_systems: Callable[[Builder], Sequence[System]] | None = None
    meet: Callable[[Suite, Sequence[System]], Suite] | None = None

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"suite {self.name} has the tasks {names}; allowed: one or more, each once")
        for task in self.tasks:
            ids = [example.id for example in task.examples()]
            if not ids:
                raise DataError(f"task {task.name} of suite {self.name} has no example; give it at least one")
            if len(set(ids)) < len(ids):
                twice = next(id_ for id_ in ids if ids.count(id_) > 1)
                raise DataError(f"task {task.name} of suite {self.name} has two examples named {twice!r}")

    def summary(self, records: ByTask) -> Summary:
        """The benchmark's own figures of one system's records, and what they may be called."""
        found = self.summarise(records)
        departures = [*self.departures, *found.departures, *([] if self.cuts else self._cut(records))]
        title = found.title or self.title or self.name
        return replace(
            found,
            title=f"Variant of {title}" if departures else title,
            notes=(*departures, *self.notes, *found.notes),
            departures=(),
        )

    def _cut(self, records: ByTask) -> list[str]:
        """The note of prompts that were cut, with what they were cut to: each task has its own room."""
        if not (count := sum(record.cut for some in records.values() for record in some)):
            return []
        rooms = {
            task.max_prompt_tokens
            for task in self.tasks
            if isinstance(task, Task) and any(record.cut for record in records.get(task.name, ()))
        }
        known = sorted(room for room in rooms if room is not None)
        ends = " to ".join(dict.fromkeys((str(known[0]), str(known[-1])))) if known else ""
        to = f"to {ends} tokens" if known else "in the middle"
        return [f"{count} of {sum(map(len, records.values()))} prompts cut {to}"]


def mean_summary(records: ByTask, *, maximum: int = 100, digits: int = 2) -> Summary:
    """The mean score of each task, rounded, and the plain mean of these.

    Args:
        records: of one system, by task; records without a score do not count.
        maximum: what the best score counts as.
        digits: after the decimal point.
    """
    tasks = {}
    for name, some in records.items():
        scores = [record.score for record in some if record.score is not None]
        if scores:
            tasks[name] = round(maximum * sum(scores) / len(scores), digits)
    average = round(sum(tasks.values()) / len(tasks), digits) if tasks else None
    return Summary(tasks=tasks, average=average)
