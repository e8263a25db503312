"""A journal of finished units of a long evaluation, one JSON line each, from which an interrupted run
resumes.
"""

from __future__ import annotations

import hashlib
import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

from longtrain.errors import ConfigError, DataError
from longtrain.journals import Journal, read_journal

Json = dict[str, Any]
ADVICE = "remove this line (its examples are run again), or the file"


class ResultsJournal:
    """The finished units of one system, in one file per shard.

    The first line of a file holds the settings, every other one a unit. A line is flushed to the disk before
    `put` returns; an incomplete last line, left by a kill, is dropped. While the journal is open no other
    process can write the same shard.

    Args:
        folder: the folder of the files.
        name: the system's name; any text.
        settings: JSON values that determine the results of its units.
        shard: number of the file that `put` writes.
        write: False opens for reading: `put` is refused and nothing is locked.

    Raises:
        ConfigError: a file was written with other settings, or another run writes this shard.
        DataError: a line of a file is damaged, or was edited.
    """

    def __init__(
        self, folder: Path, name: str, settings: Json, *, shard: int = 0, write: bool = True
    ) -> None:
        self.folder, self.name, self.settings = folder, name, _plain(settings)
        self.done: dict[str, Json] = {}
        self._journal: Journal | None = None
        mark = hashlib.sha256(name.encode()).hexdigest()[:8]  # two names may have the same readable part
        readable = re.sub(r"[^A-Za-z0-9.=@+]+", "-", name).strip("-")
        self._stem = f"{readable}-{mark}"
        try:
            if write:
                self._journal = Journal(folder / f"{self._stem}.{shard}.jsonl")
                if self._journal.empty:
                    self._journal.append({"settings": self.settings})
            self.reload()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ResultsJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, key: str, payload: Json) -> Json:
        """Append a unit atomically; returns it as it will be read back.

        Raises:
            LongtrainError: the disk is full or not writable; earlier units stay intact.
        """
        assert self._journal is not None, "a journal opened for reading"
        payload = _plain(payload)
        self._journal.append({"key": key, "payload": payload})
        self.done[key] = payload
        return payload

    def reload(self) -> dict[str, Json]:
        """Read all shards' files again, to see units that other processes have finished since."""
        self.done = {}
        for path in sorted(self.folder.glob(f"{_escaped(self._stem)}.*.jsonl")):
            for number, values in read_journal(path, advice=ADVICE):
                self._take(path, number, values)
        return self.done

    def close(self) -> None:
        """Release the lock on this shard."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _take(self, path: Path, number: int, values: Json) -> None:
        made_with, key, payload = values.get("settings"), values.get("key"), values.get("payload")
        if number > 1 and isinstance(key, str) and isinstance(payload, dict):
            self.done.setdefault(key, payload)
            return
        if number > 1 or not isinstance(made_with, dict):
            wanted = "settings" if number == 1 else "a key and a payload"
            raise DataError(f"{path} line {number} cannot be read: it has not {wanted}; {ADVICE}")
        if made_with != self.settings:
            key, had, wants = first_difference(made_with, self.settings)
            raise ConfigError(
                f"{path} was written with {key}={had}, and {key}={wants} is asked for; pass name=OTHER, or "
                f"remove {path.parent}"
            )


def first_difference(one: Json, other: Json, *, prefix: str = "") -> tuple[str, str, str]:
    """(key, value there, value here) of the first setting, by name, in which two mappings differ
    (`a.b.3`).
    """
    key = next(k for k in sorted({*one, *other}) if one.get(k, _MISSING) != other.get(k, _MISSING))
    a, b = one.get(key, _MISSING), other.get(key, _MISSING)
    if isinstance(a, dict) and isinstance(b, dict):
        return first_difference(a, b, prefix=f"{prefix}{key}.")
    if isinstance(a, list) and isinstance(b, list):
        pairs = zip_longest(a, b, fillvalue=_MISSING)
        at, x, y = next((i, x, y) for i, (x, y) in enumerate(pairs) if x != y)
        inner = [{} if value is _MISSING else {str(at): value} for value in (x, y)]
        return first_difference(*inner, prefix=f"{prefix}{key}.")
    return f"{prefix}{key}", _short(a), _short(b)


_MISSING = object()


def _escaped(name: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", name)


def _plain(values: Json) -> Json:
    """The values as JSON returns them: tuples are lists, keys are strings."""
    plain: Json = json.loads(json.dumps(values, allow_nan=False))
    return plain


def _short(value: Any) -> str:
    if value is _MISSING:
        return "none"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
