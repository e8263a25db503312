"""LongBench as a suite: its 16 English tasks, and the rules of what a result may be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longtrain.evaluation import longbench
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.suite import ByTask, Suite, Summary
from longtrain.evaluation.suites.settings import Settings
from longtrain.evaluation.suites.window import prompts_up_to

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.target.model import Target


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The tasks that `suite.tasks` names, of the rows at `suite.data`.

    Args:
        settings: `data`, `tasks`, `limit`, `max_prompt_tokens`, `chat`; see conf/suite/longbench.yaml.
        target: its window decides how long prompts may be.
        seed: of the run; nothing is drawn here.
        sampling: how the run decodes.

    Raises:
        ConfigError: a wrong setting.
        DataError: a missing file or field.
    """
    read = Settings(settings)
    names = read.names("tasks", longbench.NAMES)
    chat = read.flag("chat")
    most = read.optional_integer("max_prompt_tokens", least=2)
    loaded = longbench.load(read.text("data"), names, limit=read.optional_integer("limit"))
    tasks = prompts_up_to(most, [replace(task, chat=task.chat and chat) for task in loaded], target)
    window = min(prompt_room(replace(task, max_prompt_tokens=None), target) for task in tasks)

    def summarise(records: ByTask) -> Summary:
        ran = {
            name: longbench.Ran(
                tuple(float(record.score or 0.0) for record in some), sum(record.cut for record in some)
            )
            for name, some in records.items()
        }
        cut_to = window if most is None else most
        found = longbench.summarise(ran, max_tokens=cut_to, window_tokens=window, chat=chat)
        figures = {name: float(task["score"]) for name, task in found["tasks"].items()}
        published = {name: int(task["rows_published"]) for name, task in found["tasks"].items()}
        extra = {"whole": found["whole"], "rows_published": published}
        return Summary(str(found["name"]), tuple(found["notes"]), figures, float(found["average"]), extra)

    return Suite("longbench", tuple(tasks), summarise=summarise)
