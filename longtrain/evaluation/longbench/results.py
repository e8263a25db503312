"""Scores of tasks and of the benchmark, and what a result may be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longtrain.errors import DataError
from longtrain.evaluation.longbench.tasks import SPECS

WHOLE = "LongBench"
VARIANT = "Variant of LongBench"
"""The names a result can have: a subset, or prompts cut shorter than the target can read, is a `VARIANT`."""


@dataclass(frozen=True)
class Ran:
    """What came of a task.

    Args:
        scores: of its examples, 0 to 1.
        cut: prompts whose middle was left out.
    """

    scores: tuple[float, ...]
    cut: int = 0


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


def title(ran: Mapping[str, Ran], *, max_tokens: int, window_tokens: int, chat: bool = True) -> Title:
    """What a result may be called.

    `LongBench` is only what ran all rows of all 16 tasks, with chat templates where the benchmark has them
    and no prompt cut shorter than the target could have read.

    Args:
        ran: what was run, by task.
        max_tokens: what longer prompts were cut to.
        window_tokens: longest prompt that the protocol allows this target: its context less the answer.
        chat: whether chat templates were used.
    """
    wrong = []
    if set(ran) != set(SPECS):
        wrong.append(f"{len(set(ran) & set(SPECS))} of {len(SPECS)} tasks")
    short = [name for name in SPECS if name in ran and len(ran[name].scores) != SPECS[name].rows]
    if short:
        have, all_ = sum(len(ran[name].scores) for name in short), sum(SPECS[name].rows for name in short)
        which = ", ".join(short) if len(short) <= 3 else f"{len(short)} tasks"
        wrong.append(f"{have} of {all_} rows of {which}")
    cut = sum(task.cut for task in ran.values())
    how = f"{cut} prompts cut to {max_tokens} tokens"
    if cut and max_tokens < window_tokens:
        wrong.append(f"{how}, the target reads {window_tokens}")
    if not chat:
        wrong.append("without chat template")
    if wrong:
        return Title(VARIANT, tuple(wrong))
    return Title(WHOLE, (how,) if cut else ())


def summarise(
    ran: Mapping[str, Ran], *, max_tokens: int, window_tokens: int, chat: bool = True
) -> dict[str, Any]:
    """JSON values: `title`, `notes`, `whole`, `tasks` (score, rows, rows published, cut) and `average`.

    The average is the plain mean of the tasks' rounded scores, rounded to 2 digits.

    Args: as `title`.

    Raises:
        DataError: nothing was run, or a task without an example.
    """
    if not ran:
        raise DataError("no LongBench task was run; run at least one")
    named = title(ran, max_tokens=max_tokens, window_tokens=window_tokens, chat=chat)
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
