"""Shared parts of suites: parsing settings, reading examples from files and the Hub, checking
prompt lengths.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from longtrain.data.read.files import HUB, local_file, read_jsonl
from longtrain.data.read.manifest import Part, resolve, rows
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.task import Task
from longtrain.settings import read, wrong

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Kind = TypeVar("Kind")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

LOCAL = "check the id and the network, or pass a local file of JSON lines"
"""Advice for a data set on the Hub that cannot be read."""

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
"""Keys of the group `suite` that the harness reads; every suite has them in addition to its own."""


def settings_of(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Parse the settings of a suite from the group `suite` of the configuration.

    Args:
        kind: a dataclass with the suite's own keys; see `longtrain.settings`.
        values: the whole group, including the keys that every suite has.

    Raises:
        ConfigError: a key is missing or unknown, or a value is not allowed.
    """
    return read(kind, values, "suite", ignore=HARNESS_KEYS)


def check_settings(module: Any, values: Mapping[str, Any]) -> None:
    """Refuse wrong keys of a suite before the target is loaded.

    Args:
        module: the suite's module; its own keys are the one dataclass whose name ends with Settings.
        values: the whole group `suite`.

    Raises:
        ConfigError: see `settings_of`.
    """
    for name, kind in vars(module).items():
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        if name.endswith("Settings") and is_dataclass(kind):
            settings_of(kind, values)


def read_rows(where: str, what: str, fields: Mapping[str, tuple[type, ...]]) -> list[dict[str, Any]]:
    """Read the examples of a benchmark's file, in order.

    Args:
        where: a file of JSON lines or one JSON list (plain, .xz or .gz), `hub:ORG/NAME/FILE`, or a data set
            on the Hub as `ORG/NAME`, of which `train` is read. A path that exists on disk takes precedence.
        what: the benchmark's name, for messages.
        fields: required field -> its types; other fields are allowed.

    Raises:
        ConfigError: `where` does not exist.
        DataError: the Hub does not answer, or an example lacks a field or has one of another type (file and
            line are named).
    """
    path = local_file(where)
    if path.is_file():
        named = [(str(path.parent / place), row) for place, row in read_jsonl(path)]
    elif on_hub(where):
        found = hub_rows(where, what, LOCAL, split="train", config=None)
        named = [(place, dict(row)) for place, row in found]
    else:
        raise ConfigError(
            f"{what} data at {where}: no file and no Hub id; pass a file of JSON lines (plain, .xz or .gz), "
            "hub:ORG/NAME/FILE, or ORG/NAME while online"
        )
    for place, row in named:
        check_fields(row, place, what, fields)
    if not named:
        raise DataError(f"{where} has no example of {what}; pass a file with at least one")
    return [row for _, row in named]


def distinct(names: Iterable[str]) -> list[str]:
    """Make names of examples unique; a repeated name gets the suffix `#2`, `#3` and so on."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def on_hub(where: str) -> bool:
    """True if `ORG/NAME` refers to the Hub because no such path exists on disk."""
    return (
        not where.startswith(HUB) and _HUB_ID.fullmatch(where) is not None and not local_file(where).exists()
    )


def existing_file(where: str, what: str) -> Path:
    """The path of a file that must exist: a local path, or `hub:ORG/NAME/FILE`.

    Raises:
        DataError: the file does not exist.
    """
    path = local_file(where)
    if not path.exists():
        raise DataError(
            f"{what}: nothing at {path}; pass a path that exists, or hub:ORG/NAME/FILE while online"
        )
    return path


def hub_rows(
    hub: str, what: str, instead: str, *, split: str, config: str | None
) -> list[tuple[str, Mapping[str, Any]]]:
    """Read the examples of a data set on the Hub, each with its location for messages.

    Args:
        hub: `ORG/NAME`.
        what: the benchmark's name, for messages.
        instead: advice if the Hub does not answer.
        split: the data set's split.
        config: the data set's configuration.

    Raises:
        DataError: the Hub does not answer.
    """
    part = Part(hub=hub, licence="", adapter="", config=config, split=split)
    try:
        return list(rows(part, resolve(part), None))
    except DataError as error:
        raise DataError(
            f"{what}: data set {hub} could not be read from the Hub ({error.__cause__ or error}); {instead}"
        ) from error


def check_lengths(lengths: Sequence[int], answer: int, target: Target) -> None:
    """Refuse prompts that do not fit the target's context window.

    Args:
        lengths: prompt lengths, the longest one last.
        answer: tokens that follow a prompt.
        target: the frozen model.

    Raises:
        ConfigError: the longest prompt and its answer are too long.
    """
    window = target.info.max_positions
    if lengths[-1] + answer > window:
        beside = f" beside {answer} new tokens" if answer else ""
        most = f"up to {window - answer}{beside}, in the target's context of {window}"
        raise wrong("suite.lengths", list(lengths), f"{most}; pass lengths of at most {window - answer}")


def prompts_up_to(most: int | None, tasks: Sequence[Task], target: Target) -> list[Task]:
    """Limit the tasks' prompts to `most` tokens, chat template not counted.

    Args:
        most: `suite.max_prompt_tokens`; None: the room in the target's context window.
        tasks: the suite's tasks.
        target: the target that reads the prompts.

    Raises:
        ConfigError: `most` exceeds the room in the target's window, or not even an answer fits the window.
    """
    rooms = {task.name: prompt_room(replace(task, max_prompt_tokens=None), target) for task in tasks}
    name, room = min(rooms.items(), key=lambda item: item[1])
    if most is not None and most > room:
        window = f"the window of {target.info.max_positions} tokens leaves beside the answers of {name}"
        raise wrong("suite.max_prompt_tokens", most, f"up to {room}, what {window}; null takes all there is")
    return [replace(task, max_prompt_tokens=most or rooms[task.name]) for task in tasks]


REMEDY = "correct the example or leave it out"


def check_fields(
    row: Mapping[str, Any], place: str, what: str, fields: Mapping[str, tuple[type, ...]]
) -> None:
    """Refuse an example without a field or with a field of another type.

    Raises:
        DataError: a field is missing or wrong; the message names the example's location.
    """
    for field, types in fields.items():
        if field not in row:
            raise DataError(
                f"{place}: field '{field}' is missing, there are {', '.join(row) or 'none'}; an example of "
                f"{what} has {', '.join(fields)}: {REMEDY}"
            )
        if not isinstance(row[field], types) or (isinstance(row[field], bool) and bool not in types):
            allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            found = type(row[field]).__name__
            article = "an" if found[0] in "aeiou" else "a"
            raise DataError(f"{place}: field '{field}' is {article} {found}; it must be {allowed}: {REMEDY}")
