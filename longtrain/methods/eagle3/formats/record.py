"""The record that longtrain leaves in a folder for engines: checksums of its files, its keys as exported."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from longtrain.errors import ArtifactError
from longtrain.files import open_regular, read_json
from longtrain.methods.eagle3.formats.golden import FOLDER, GOLDEN, RECORD
from longtrain.methods.eagle3.formats.names import CONFIG, MODEL, read_config

Json = dict[str, Any]

FREE = ("speculators_config", "dtype", "torch_dtype", "transformers_version")
"""Keys of `config.json` that may be edited after the export."""


def read_record(folder: Path) -> Json | None:
    """What a folder says of its own files; None where another tool wrote it.

    Raises:
        ArtifactError: longtrain wrote the folder, and its record is missing or damaged.
    """
    path = folder / RECORD
    if not path.is_file():
        if (folder / FOLDER).is_dir() or read_config(folder).get("trained_by") == "longtrain":
            raise ArtifactError(f"{path} is missing; copy the whole folder, or export it again")
        return None
    try:
        record = read_json(path)
        kinds = {"config": dict, "files": dict, "fresh": list}
        if not all(isinstance(record[key], kind) for key, kind in kinds.items()):
            raise ValueError("a key is of another kind")
        if lost := [name for name in (CONFIG, MODEL, GOLDEN) if name not in record["files"]]:
            raise ValueError(f"files has no checksum of {', '.join(lost)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; export the folder again") from None
    return record


def changed_files(folder: Path, record: Json) -> list[str]:
    """Files of a folder that are missing, or not what its record says."""
    wrong = []
    for name, checksum in record["files"].items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
            continue
        with os.fdopen(open_regular(path), "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != checksum:
                wrong.append(f"{name} is not what was exported (sha256 differs)")
    return wrong


def changed_keys(then: Json, now: Json, before: str = "") -> list[str]:
    """Keys of `config.json` that are missing, new or have another value."""
    wrong = []
    for key in dict.fromkeys([*then, *now]):
        path = before + key
        if path in FREE or (key not in then and then.get(key) == now.get(key)):
            continue
        if key not in now:
            wrong.append(f"{CONFIG} lacks {path} (exported: {json.dumps(then[key])})")
        elif isinstance(then.get(key), dict) and isinstance(now[key], dict):
            wrong += changed_keys(then[key], now[key], f"{path}.")
        elif key not in then or then[key] != now[key]:
            wrong.append(
                f"{CONFIG} has {path}={json.dumps(now[key])} (exported: {json.dumps(then.get(key))})"
            )
    return wrong


def refuse_changed(folder: Path) -> None:
    """Refuse a folder that longtrain wrote and that was changed since.

    Raises:
        ArtifactError: a file or a key is another; the message says all of it.
    """
    if (record := read_record(folder)) is None:
        return
    others = {name: checksum for name, checksum in record["files"].items() if name != CONFIG}
    wrong = changed_files(folder, {"files": others})
    wrong += changed_keys(record["config"], read_config(folder))  # of the others some may be edited
    if wrong:
        raise ArtifactError(f"{folder}: {'; '.join(wrong)}; export it again, or copy it whole")
