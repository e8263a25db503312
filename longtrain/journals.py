"""Files of JSON lines that survive a kill, each line with a checksum, so that an edited one is refused."""

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
"""Bytes; a longer line is none of ours."""
_CHECKSUM = re.compile(rb', "sha256": "([0-9a-f]{16})"\}$')
"""The end of a line: the first 16 hex digits of the sha256 of the line without this key."""

_SUMMED = "checksums"
"""A key of the first line of a file whose lines have checksums, so that one without them all is not old."""

_old: set[Path] = set()
"""Journals without checksums that a warning was written for."""


class Journal:
    """A file of lines that is only ever appended to, by one process at a time.

    A line is on the disk before `append` returns. The part of a line that a kill left at the end is dropped
    when the file is opened again.

    Args:
        path: of the file; its folder is created where it is missing.

    Raises:
        ConfigError: another process writes the file.
        LongtrainError: the file cannot be written, or is no regular file.
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
        """Whether the file held no line when it was opened."""

    def append(self, values: Mapping[str, Any]) -> None:
        """Add a line, whole or not at all.

        Args:
            values: JSON values; at least one.

        Raises:
            LongtrainError: the disk is full or not writable; what was there before is still there.
        """
        end = self._stream.seek(0, os.SEEK_END)
        try:
            rest = with_checksum({**values, _SUMMED: True} if end == 0 else values)
            while rest:
                rest = rest[self._stream.write(rest) :]
            os.fsync(self._stream.fileno())
        except OSError as error:
            self._stream.truncate(end)
            raise cannot_write(self.path, error) from None

    def close(self) -> None:
        """Let other processes write the file."""
        self._stream.close()


def with_checksum(values: Mapping[str, Any]) -> bytes:
    """A line of a journal: JSON values, their checksum as the last key, and the line's end."""
    body = json.dumps(values, allow_nan=False).encode()
    return body[:-1] + f', "sha256": "{_sum(body)}"}}\n'.encode()


def read_journal(path: Path, *, advice: str, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a journal; the part of one that a kill left at the end is not among them.

    Lines that an earlier longtrain wrote have no checksum. They are taken with a warning, where no line in
    front of them has one and the first does not say that they have: hours of work are in them, and nothing
    shows that they are damaged.

    Args:
        path: of the file.
        advice: what is to be done about a damaged line, for the message.
        start: lines in front of this one, from 0, are not given back.

    Yields:
        The line's number, from 1, and its values.

    Raises:
        DataError: a line was changed since it was written, or is none of a journal.
    """
    summed = False
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            number = 0
            while (line := stream.readline(LONGEST_LINE)).endswith(b"\n"):
                number += 1
                values, has_sum = _values(line[:-1])
                summed = values.pop(_SUMMED, False) is True or summed
                if summed and not has_sum:
                    raise ValueError("its checksum is missing")
                if not has_sum and path not in _old:
                    _old.add(path)
                    log.warning(
                        "%s was written by an earlier longtrain, without a checksum for each line; it is "
                        "taken as it is, and nothing shows whether it was edited since",
                        path,
                    )
                summed = has_sum
                if number > start:
                    yield number, values
    except ValueError as error:
        raise DataError(f"{path} line {number} cannot be read: {error}; {advice}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {advice}") from None


def unchecked(folder: Path) -> list[str]:
    """Journals below a folder that this process has read although their lines have no checksums.

    What is made from them says so, since nothing shows whether they were edited.
    """
    return sorted(str(path) for path in _old if folder in path.parents)


def _values(line: bytes) -> tuple[dict[str, Any], bool]:
    """The values of a line, and whether it has a checksum.

    Raises:
        ValueError: it does not match its checksum, or is no JSON object.
    """
    found = _CHECKSUM.search(line)
    body = line if found is None else line[: found.start()] + b"}"
    if found is not None and _sum(body) != found[1].decode():
        raise ValueError("it does not match its checksum, so it was changed since it was written")
    values = parse_json(body)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    if found is None and "sha256" in values:
        raise ValueError("its checksum is not where it was written, so it was changed since")
    return values, found is not None


def _sum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
