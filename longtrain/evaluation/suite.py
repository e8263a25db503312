"""A suite: tasks that are run together, the scale of their scores, and the title of the result."""

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
"""Scale of suites that measure the agreement of systems with the full cache."""
DIVERGENCE = "KL per token"
"""Scale of suites that measure, in nats, how far systems are from the full cache, whose own score is 0."""


@dataclass(frozen=True)
class Scale:
    """The scale of a suite's scores.

    Args:
        name: `score`, `perplexity`.
        maximum: the best possible score, or None if unbounded.
        higher_is_better: True if higher scores are better.
    """

    name: str = "score"
    maximum: float | None = 100.0
    higher_is_better: bool = True


@dataclass(frozen=True)
class Metric:
    """A metric that a suite reports beside its score, computed from named numbers of the records.

    It is the sum of one number over the sum of another (see `analysis.numbers.numbers_of` for the names),
    reported for every system, task, facet and cell; records without these numbers do not count.

    Args:
        name: its name in results and in table headings.
        above: the number summed in the numerator.
        below: the number summed in the denominator.
        kind: `mean`: the value alone; `pooled`: with a bootstrap interval; `wilson`: with Wilson's, where
            each record is a yes or no; `change`: minus the full cache's over the same examples; `quotient`:
            the sum over that of the full cache.
        unit: `number`, `percent` (of a share) or `bytes`.
        growth: True if it is a logarithm, such as nats per token: reported as its exponential, and a change
            as growth in percent.
        plotted: True if it is plotted by context length, or by position in a sequence.
        main: True if it stands beside the score in the table of systems.
    """

    name: str
    above: str
    below: str = "one"
    kind: Literal["mean", "pooled", "wilson", "change", "quotient"] = "pooled"
    unit: Literal["number", "percent", "bytes"] = "number"
    growth: bool = False
    plotted: bool = False
    main: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Summary:
    """A benchmark's own scores of one system.

    Args:
        tasks: task -> its score, rounded as the benchmark rounds; tasks without one are missing.
        average: the benchmark's own average, or None.
        extra: further JSON values for the result.
        title: the title of the result; filled in by `Suite.summary`.
        notes: remarks on the scores, departures from the benchmark first; filled in there too.
    """

    tasks: Mapping[str, float] = field(default_factory=dict)
    average: float | None = None
    extra: Json = field(default_factory=dict)
    title: str = ""
    notes: tuple[str, ...] = ()


ByTask = Mapping[str, Sequence[Record]]
"""Records of one system, by task."""


@dataclass(frozen=True)
class Suite:
    """A suite as run by `longtrain eval suite=NAME`: tasks, scale and the rules of its report.

    Args:
        name: the suite's name.
        tasks: at least one; names are distinct.
        scale: the scale of the scores.
        summarise: computes the benchmark's own scores.
        title: the title of a result without departures; empty: the name.
        departures: departures that make a result a variant of the benchmark; see `evaluation/published.py`.
        notes: remarks for every result that do not affect the title.
        cuts: True if the benchmark itself cuts prompts that are too long; otherwise a cut prompt is a
            departure.
        needs: roles that a system may have: evictor, draft, selector, or several of them.
        metrics: metrics reported beside the score.
        solvable: True if a good target can answer every prompt, so that a full cache below half
            the scale means that the results cannot separate systems.
        full_cache: also run the target with its full cache and without a draft.
        rivals: systems that ran -> pairs of names; their differences over the same examples are reported.
        own_systems: creates systems that the suite itself adds, such as an upper bound.
        meet: called with the suite and the systems before anything runs; may refuse them, and returns the
            suite to run, for example with notes on them.
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
    metrics: tuple[Metric, ...] = ()
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
        """Compute the benchmark's own scores from one system's records, with the result's title and notes."""
        departures = [*self.departures, *([] if self.cuts else self._cut(records))]
        title = self.title or self.name
        return replace(
            self.summarise(records),
            title=f"Variant of {title}" if departures else title,
            notes=(*departures, *self.notes),
        )

    def _cut(self, records: ByTask) -> list[str]:
        """The note about prompts that were cut, with the limit of each task."""
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
        records: records of one system, by task; records without a score do not count.
        maximum: the value of the best score.
        digits: number of decimals.
    """
    tasks = {}
    for name, some in records.items():
        scores = [record.score for record in some if record.score is not None]
        if scores:
            tasks[name] = round(maximum * sum(scores) / len(scores), digits)
    average = round(sum(tasks.values()) / len(tasks), digits) if tasks else None
    return Summary(tasks=tasks, average=average)


def title_and_notes(summaries: Mapping[str, Summary]) -> tuple[str, list[str]]:
    """The title of a result with all these systems, and its notes.

    If systems have different titles, the longest is used, since it names the departures from the benchmark.

    Args:
        summaries: one for each system's name.
    """
    notes = list(dict.fromkeys(note for summary in summaries.values() for note in summary.notes))
    titles = {summary.title for summary in summaries.values()}
    if len(titles) > 1:
        notes += [f"{name} alone: {summary.title}" for name, summary in summaries.items()]
    return max(sorted(titles), key=len), notes
