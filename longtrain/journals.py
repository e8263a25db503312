"""Append-only files of JSON lines that survive a kill; every line has a checksum, so edits are detected."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from longtrain.errors import ConfigError, DataError
from longtrain.files import cannot_write, open_regular, parse_json, try_lock
from longtrain.log import get_logger

log = get_logger(__name__)

LONGEST_LINE = 2**30
"""Largest length of a line in bytes."""
_CHECKSUM = re.compile(rb', "sha256": "([0-9a-f]{16})"\}$')
"""Matches the end of a line: the first 16 hex digits of the sha256 of the line without this key."""


class Journal:
    """A file of JSON lines that one process at a time appends to.

    `append` returns once the line is flushed to the disk. An incomplete last line, left by a kill, is removed
    when the file is opened again.

    Args:
        path: path of the file; its folder is created if it is missing.

    Raises:
        ConfigError: another process is writing the file.
        LongtrainError: the file cannot be written, or is not regular.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self._stream: FileIO = os.fdopen(handle, "ab+", buffering=0)  # type: ignore[assignment]
        except OSError as error:
            raise cannot_write(path, error) from None
        if not try_lock(self._stream, path):
            self.close()
            raise ConfigError(f"{path} is being written by another run; wait for it, or pass name=OTHER")
        self._stream.seek(0)
        content = self._stream.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            log.info("torn line dropped path=%s bytes=%d", path, len(content) - whole)
            self._stream.truncate(whole)
        self.empty = whole == 0
        """True if the file held no line when it was opened."""

    def append(self, values: Mapping[str, Any]) -> None:
        """Append a line atomically.

        Args:
            values: JSON values; at least one.

        Raises:
            LongtrainError: the disk is full or not writable; the earlier lines are unchanged.
        """
        end = self._stream.seek(0, os.SEEK_END)
        try:
            rest = with_checksum(values)
            while rest:
                rest = rest[self._stream.write(rest) :]
            os.fsync(self._stream.fileno())
        except OSError as error:
            self._stream.truncate(end)
            raise cannot_write(self.path, error) from None

    def close(self) -> None:
        """Close the file, so that other processes can write it."""
        self._stream.close()


def journals_in(folder: Path) -> Path:
    """Return the folder of a run's journals: `journals`, or `ledger` if an earlier version began them."""
    earlier = folder / "ledger"
    return earlier if earlier.is_dir() else folder / "journals"


def with_checksum(values: Mapping[str, Any]) -> bytes:
    """Return a journal line: JSON values with their checksum as the last key, and a newline."""
    body = json.dumps(values, allow_nan=False).encode()
    return body[:-1] + f', "sha256": "{_sum(body)}"}}\n'.encode()


def read_journal(path: Path, *, advice: str, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a journal, without an incomplete last line that a kill left.

    Args:
        path: path of the file.
        advice: end of the error message, which tells users how to repair a damaged line.
        start: index of the first line to yield, from 0.

    Yields:
        The line's number, from 1, and its values.

    Raises:
        DataError: a line was changed since it was written, or is not a journal's line.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            number = 0
            while (line := stream.readline(LONGEST_LINE)).endswith(b"\n"):
                number += 1
                values = _values(line[:-1])
                if number > start:
                    yield number, values
    except ValueError as error:
        raise DataError(f"{path} line {number} cannot be read: {error}; {advice}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {advice}") from None


def _values(line: bytes) -> dict[str, Any]:
    """Parse a line and verify its checksum."""
    found = _CHECKSUM.search(line)
    if found is None:
        raise ValueError("its checksum is missing, so it was changed since it was written")
    body = line[: found.start()] + b"}"
    if _sum(body) != found[1].decode():
        raise ValueError("it does not match its checksum, so it was changed since it was written")
    values = parse_json(body)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return values


def _sum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
