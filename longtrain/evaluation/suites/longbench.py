"""LongBench as a suite: its 16 English tasks, and the rules of what a result may be called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longtrain.evaluation import longbench
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.suite import ByTask, Suite, Summary
from longtrain.evaluation.suites.shared import not_greedy, prompts_up_to, settings_of
from longtrain.evaluation.task import Example
from longtrain.settings import Count, Text, some_of, wrong

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

COPY = "rows of a copy: tasks, counts, ids, lengths and the answers that are known are those published"
"""Said of rows that do not come from the authors' data set: no hash of its files is published."""


@dataclass(frozen=True)
class LongBenchSettings:
    """The keys of the suite; see conf/suite/longbench.yaml."""

    data: Text
    tasks: some_of(longbench.NAMES)  # type: ignore[valid-type]
    limit: Count | None
    max_prompt_tokens: Count | None
    chat: bool

    def __post_init__(self) -> None:
        if self.max_prompt_tokens == 1:
            raise wrong("suite.max_prompt_tokens", 1, "2 or more, or null")


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The tasks that `suite.tasks` names, of the rows at `suite.data`.

    Args:
        settings: see conf/suite/longbench.yaml.
        target: its window decides how long prompts may be.
        seed: of the run; nothing is drawn here.
        sampling: how the run decodes; LongBench is greedy.

    Raises:
        ConfigError: a wrong setting.
        DataError: a missing file or field.
    """
    options = settings_of(LongBenchSettings, settings)
    whole = longbench.load(options.data, options.tasks)
    loaded = [
        replace(task, rows=task.rows[: options.limit], chat=task.chat and options.chat) for task in whole
    ]
    tasks = prompts_up_to(options.max_prompt_tokens, loaded, target)
    rooms = {task.name: prompt_room(task, target) for task in tasks}
    official = longbench.published(options.data)
    departures = not_greedy(sampling)
    if not official:
        departures += _unlike_published({task.name: task.rows for task in whole})

    def summarise(records: ByTask) -> Summary:
        ran = {
            name: longbench.TaskRun(
                tuple(float(record.score or 0.0) for record in some),
                sum(record.cut for record in some),
                rooms[name],
            )
            for name, some in records.items()
        }
        name, notes = longbench.title(
            ran, chat=options.chat, departures=departures, notes=[] if official else [COPY]
        )
        figures = {name: longbench.task_score(one.scores) for name, one in ran.items()}
        average = round(sum(figures.values()) / len(figures), 2)
        published = {name: longbench.SPECS[name].rows for name in ran}
        extra = {"whole": name == longbench.WHOLE, "rows_published": published}
        return Summary(name, notes, figures, average, extra)

    return Suite("longbench", tuple(tasks), summarise=summarise)


def _unlike_published(tasks: Mapping[str, Sequence[Example]]) -> list[str]:
    """A note on rows of a copy that are not recognised, and one on rows that are there twice."""
    notes = []
    found = [note for name, rows in tasks.items() for note in longbench.unlike_published(name, rows)]
    if found:
        more = f" and {len(found) - 1} more signs" if len(found) > 1 else ""
        notes.append(f"rows that are not recognised as the published ones: {found[0]}{more}")
    if twice := sum(_repeated(rows) for rows in tasks.values()):
        notes.append(f"rows that repeat one before them: {twice}")
    return notes


def _repeated(rows: Sequence[Example]) -> int:
    """How many rows have the question, context and answers of another one before them."""
    seen = {json.dumps([row.fields[key] for key in ("input", "context", "answers")]) for row in rows}
    return len(rows) - len(seen)
