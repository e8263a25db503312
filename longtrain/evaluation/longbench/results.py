"""Scores of tasks and of the benchmark, and what a result may be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longtrain.errors import DataError
from longtrain.evaluation.longbench.tasks import SPECS

WHOLE = "LongBench"
VARIANT = "Variant of LongBench"
"""The names a result can have: with any departure, a cut prompt among them, it is a `VARIANT`."""

NAMED = 3
"""Most tasks that a note lists by name."""


@dataclass(frozen=True)
class Ran:
    """What came of a task.

    Args:
        scores: of its examples, 0 to 1.
        cut: prompts whose middle was left out.
        room: most tokens of a prompt.
    """

    scores: tuple[float, ...]
    cut: int = 0
    room: int = 0


@dataclass(frozen=True)
class Title:
    """The name of a result and every departure from the whole benchmark."""

    name: str
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether this is a LongBench result."""
        return self.name == WHOLE

    def __str__(self) -> str:
        return f"{self.name} ({'; '.join(self.notes)})" if self.notes else self.name


def task_score(scores: Sequence[float]) -> float:
    """A task's score: 100 times the mean over its examples, rounded to 2 digits.

    Raises:
        DataError: no example.

    Source: LongBench, eval.py, `scorer`; summed from left to right as there.
    """
    if not scores:
        raise DataError("a LongBench task has no scored example; run at least one")
    total = 0.0
    for score in scores:
        total += score
    return round(100 * total / len(scores), 2)


def title(
    ran: Mapping[str, Ran], *, chat: bool = True, departures: Sequence[str] = (), notes: Sequence[str] = ()
) -> Title:
    """What a result may be called.

    `LongBench` is only what ran all rows of all 16 tasks, with chat templates where the benchmark has them,
    every prompt whole and nothing else departed from. The official runner cuts prompts that are too long for
    a model; such a run is a `VARIANT` here, since its figures are those of the model's window too.

    Args:
        ran: what was run, by task.
        chat: whether chat templates were used.
        departures: others.
        notes: what is to be said beside a whole result.
    """
    wrong = []
    if set(ran) != set(SPECS):
        wrong.append(f"{len(set(ran) & set(SPECS))} of {len(SPECS)} tasks")
    short = [name for name in SPECS if name in ran and len(ran[name].scores) != SPECS[name].rows]
    if short:
        have, all_ = sum(len(ran[name].scores) for name in short), sum(SPECS[name].rows for name in short)
        which = ", ".join(short) if len(short) <= NAMED else f"{len(short)} tasks"
        wrong.append(f"{have} of {all_} rows of {which}")
    wrong += _cut(ran)
    if not chat:
        wrong.append("without chat template")
    wrong += departures
    return Title(VARIANT, tuple(wrong)) if wrong else Title(WHOLE, tuple(notes))


def _cut(ran: Mapping[str, Ran]) -> list[str]:
    """The note of prompts that were cut, with what they were cut to: each task has its own room."""
    cut = {name: task for name, task in ran.items() if task.cut}
    if not cut:
        return []
    count, rooms = sum(task.cut for task in cut.values()), {task.room for task in cut.values()}
    of = f"{count} of {sum(len(task.scores) for task in ran.values())} prompts cut"
    if len(rooms) == 1:
        return [f"{of} to {rooms.pop()} tokens"]
    if len(cut) <= NAMED:
        return [
            f"{of}: " + ", ".join(f"{one.cut} of {name} to {one.room} tokens" for name, one in cut.items())
        ]
    return [f"{of} to {min(rooms)} to {max(rooms)} tokens, by task"]


def summarise(
    ran: Mapping[str, Ran], *, chat: bool = True, departures: Sequence[str] = (), notes: Sequence[str] = ()
) -> dict[str, Any]:
    """JSON values: `title`, `notes`, `whole`, `tasks` (score, rows, rows published, cut) and `average`.

    The average is the plain mean of the tasks' rounded scores, rounded to 2 digits.

    Args: as `title`.

    Raises:
        DataError: nothing was run, or a task without an example.
    """
    if not ran:
        raise DataError("no LongBench task was run; run at least one")
    named = title(ran, chat=chat, departures=departures, notes=notes)
    tasks = {
        name: {
            "score": task_score(task.scores),
            "rows": len(task.scores),
            "rows_published": SPECS[name].rows,
            "cut": task.cut,
        }
        for name, task in ran.items()
    }
    mean = sum(float(task["score"]) for task in tasks.values()) / len(tasks)
    return {
        "title": str(named),
        "name": named.name,
        "notes": list(named.notes),
        "whole": named.whole,
        "tasks": tasks,
        "average": round(mean, 2),
    }
