"""LongBench as a suite: its 16 English tasks, and the rules of what a result may be called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longtrain.evaluation import longbench
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.longbench.files import published
from longtrain.evaluation.suite import ByTask, Suite, Summary
from longtrain.evaluation.suites.settings import Settings
from longtrain.evaluation.suites.shared import not_greedy, prompts_up_to
from longtrain.evaluation.task import Example

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

COPY = "rows of a copy: tasks and counts are those published, the contents were not compared"
"""Said of rows that do not come from the authors' data set: no hash of its files is published."""


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The tasks that `suite.tasks` names, of the rows at `suite.data`.

    Args:
        settings: `data`, `tasks`, `limit`, `max_prompt_tokens`, `chat`; see conf/suite/longbench.yaml.
        target: its window decides how long prompts may be.
        seed: of the run; nothing is drawn here.
        sampling: how the run decodes; LongBench is greedy.

    Raises:
        ConfigError: a wrong setting.
        DataError: a missing file or field.
    """
    read = Settings(settings)
    names = read.names("tasks", longbench.NAMES)
    chat = read.flag("chat")
    most = read.optional_integer("max_prompt_tokens", least=2)
    where = read.text("data")
    loaded = longbench.load(where, names, limit=read.optional_integer("limit"))
    tasks = prompts_up_to(most, [replace(task, chat=task.chat and chat) for task in loaded], target)
    rooms = {task.name: prompt_room(task, target) for task in tasks}
    official = published(where)
    departures = not_greedy(sampling)
    if (twice := sum(_repeated(task.rows) for task in tasks)) and not official:
        departures.append(f"rows that repeat one before them: {twice}")

    def summarise(records: ByTask) -> Summary:
        ran = {
            name: longbench.Ran(
                tuple(float(record.score or 0.0) for record in some),
                sum(record.cut for record in some),
                rooms[name],
            )
            for name, some in records.items()
        }
        found = longbench.summarise(ran, chat=chat, departures=departures, notes=[] if official else [COPY])
        figures = {name: float(task["score"]) for name, task in found["tasks"].items()}
        published = {name: int(task["rows_published"]) for name, task in found["tasks"].items()}
        extra = {"whole": found["whole"], "rows_published": published}
        return Summary(str(found["name"]), tuple(found["notes"]), figures, float(found["average"]), extra)

    return Suite("longbench", tuple(tasks), summarise=summarise)


def _repeated(rows: Sequence[Example]) -> int:
    """Rows whose question, context and answers another one before them has."""
    told = {json.dumps([row.fields[key] for key in ("input", "context", "answers")]) for row in rows}
    return len(rows) - len(told)
