"""Parts of a long measurement, kept on disk as they come, so that a run that was cut off goes on."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from longtrain.errors import ConfigError, DataError
from longtrain.files import as_json, write_files

Json = dict[str, Any]


class Pieces:
    """A folder of JSON files, each with the settings that it was made with.

    Args:
        folder: where they are; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, name: str, settings: Json) -> Json | None:
        """What was kept under a name; None where there is nothing yet.

        Raises:
            ConfigError: it was made with other settings.
            DataError: the file is damaged.
        """
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            made_with, piece = kept["settings"], kept["piece"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {error}; remove it, and it is measured again") from None
        wanted = _plain(settings)
        if made_with != wanted:
            first = next(k for k in sorted({*made_with, *wanted}) if made_with.get(k) != wanted.get(k))
            raise ConfigError(
                f"{path} was measured with {first}={_short(made_with.get(first))}, and {first}="
                f"{_short(wanted.get(first))} is asked for; pass name=OTHER, or remove {path.parent}"
            )
        return piece

    def put(self, name: str, settings: Json, piece: Json) -> Json:
        """Keep a piece, whole or not at all; gives it back as it will be read."""
        piece = _plain(piece)
        path = self._path(name)
        if path is not None:
            content = as_json({"name": name, "settings": _plain(settings), "piece": piece})
            write_files(path.parent, {path.name: content})
        return piece

    def _path(self, name: str) -> Path | None:
        mark = hashlib.sha256(name.encode()).hexdigest()[:8]  # two names may read alike without their marks
        readable = re.sub(r"[^A-Za-z0-9.=]+", "-", name).strip("-")
        return None if self.folder is None else self.folder / f"{readable}-{mark}.json"


def _plain(values: Json) -> Json:
    """As JSON gives it back: tuples are lists, keys are text."""
    return json.loads(json.dumps(values, allow_nan=False))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
