"""Published rows of benchmarks from a local file or the Hub, with the fields that a suite needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtrain.data.read.files import HUB, local_file, read_jsonl
from longtrain.data.read.manifest import Part, resolve, rows
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.fields import check_fields

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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
