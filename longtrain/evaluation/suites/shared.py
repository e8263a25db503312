"""What suites share: their settings, the rows of a file, how long prompts may be, and notes on decoding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from longtrain.data.read.files import HUB, local_file, read_jsonl
from longtrain.data.read.manifest import Part, resolve, rows
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.fields import check_fields
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.task import Task
from longtrain.settings import read, wrong

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Kind = TypeVar("Kind")
AnyTask = TypeVar("AnyTask", bound=Task)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

HARNESS_KEYS = (
    "name",
    "systems",
    "policies",
    "budgets",
    "shapes",
    "batch",
    "bootstrap",
    "check_baseline",
    "record",
    "speed_prompts",
    "speed_batch",
    "speed_tokens",
)
"""Keys of the group `suite` that the harness reads; every suite has them beside its own."""


def settings_of(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """The settings of a suite from the group `suite` of the configuration.

    Args:
        kind: a dataclass with the suite's own keys; see `longtrain.settings`.
        values: the whole group, with the keys that every suite has.

    Raises:
        ConfigError: a key is missing or unknown, or a value is not allowed.
    """
    return read(kind, values, "suite", ignore=HARNESS_KEYS)


def read_rows(
    where: str,
    what: str,
    fields: Mapping[str, tuple[type, ...]],
    *,
    split: str = "train",
    config: str | None = None,
) -> list[dict[str, Any]]:
    """The rows of a benchmark's file, in its order.

    Args:
        where: a file of JSON lines or one JSON list (plain, .xz or .gz), `hub:ORG/NAME/FILE`, or a data set
            on the Hub as `ORG/NAME`. What exists on disk goes first.
        what: the benchmark, for messages.
        fields: field -> its types; rows may have others.
        split: of a data set on the Hub.
        config: of a data set on the Hub.

    Raises:
        ConfigError: nothing is there.
        DataError: the Hub does not answer, or a row lacks a field or has one of another type (file and line
            are named).
    """
    path = local_file(where)
    if path.is_file():
        named = [(str(path.parent / place), row) for place, row in read_jsonl(path)]
    elif on_hub(where):
        named = [(place, dict(row)) for place, row in _hub_rows(where, what, split, config)]
    else:
        raise ConfigError(
            f"{what} data at {where}: no file and no Hub id; pass a file of JSON lines (plain, .xz or .gz), "
            "hub:ORG/NAME/FILE, or ORG/NAME while online"
        )
    for place, row in named:
        check_fields(row, place, what, fields)
    if not named:
        raise DataError(f"{where} holds no row of {what}; pass a file with at least one")
    return [row for _, row in named]


def on_hub(where: str) -> bool:
    """Whether `ORG/NAME` is taken from the Hub: nothing on disk has that path."""
    return (
        not where.startswith(HUB) and _HUB_ID.fullmatch(where) is not None and not local_file(where).exists()
    )


def existing_file(where: str, what: str) -> Path:
    """A file that must be there: a path, or `hub:ORG/NAME/FILE`.

    Raises:
        DataError: it is not there.
    """
    path = local_file(where)
    if not path.exists():
        raise DataError(
            f"{what}: nothing at {path}; pass a path that exists, or hub:ORG/NAME/FILE while online"
        )
    return path


def _hub_rows(where: str, what: str, split: str, config: str | None) -> list[tuple[str, Mapping[str, Any]]]:
    part = Part(hub=where, licence="", adapter="", config=config, split=split)
    try:
        return list(rows(part, resolve(part), None))
    except DataError as error:
        raise DataError(
            f"{what}: data set {where} could not be read from the Hub ({error.__cause__ or error}); check "
            "the id and the network, or pass a local file of JSON lines"
        ) from error


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
        window = f"the window of {target.info.max_positions} tokens leaves beside the answers of {name}"
        raise wrong("suite.max_prompt_tokens", most, f"up to {room}, what {window}; null takes all there is")
    return [replace(task, max_prompt_tokens=most) for task in tasks]


def not_greedy(sampling: Sampling) -> list[str]:
    """The note of a run that samples; nothing for greedy decoding, whatever top_p and top_k say then."""
    return [] if sampling.greedy else [f"sampled ({described(sampling)}), not greedy"]


def described(sampling: Sampling) -> str:
    """`temperature 0.6, top_p 0.95, top_k 20`: what is not off."""
    parts = [f"temperature {sampling.temperature:g}", *narrowed(sampling)]
    return ", ".join(parts)


def narrowed(sampling: Sampling) -> list[str]:
    """`top_p 0.95` and `top_k 20`, those that are not off."""
    parts = []
    if sampling.top_p < 1:
        parts.append(f"top_p {sampling.top_p:g}")
    if sampling.top_k:
        parts.append(f"top_k {sampling.top_k}")
    return parts
