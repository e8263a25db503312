"""How long the prompts of published texts may be on a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from longtrain.errors import ConfigError
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.task import Task

if TYPE_CHECKING:
    from longtrain.targets.model import Target

AnyTask = TypeVar("AnyTask", bound=Task)


def prompts_up_to(most: int | None, tasks: Sequence[AnyTask], target: Target) -> list[AnyTask]:
    """The tasks with prompts of at most `most` tokens, chat template not counted.

    Args:
        most: `suite.max_prompt_tokens`; None: what the target's window leaves.
        tasks: of a suite.
        target: that reads the prompts.

    Raises:
        ConfigError: `most` is more than the target's window leaves, or the window holds not even an answer.
    """
    rooms = {task.name: prompt_room(replace(task, max_prompt_tokens=None), target) for task in tasks}
    name, room = min(rooms.items(), key=lambda item: item[1])
    if most is not None and most > room:
        raise ConfigError(
            f"suite.max_prompt_tokens={most}; allowed: up to {room}, what the window of "
            f"{target.info.max_positions} tokens leaves beside the answers of {name}; null takes all there is"
        )
    return [replace(task, max_prompt_tokens=most) for task in tasks]
