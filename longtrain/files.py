"""Files that appear whole or not at all, lines that survive a kill, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from longtrain.errors import ConfigError, LongtrainError
from longtrain.log import get_logger

log = get_logger(__name__)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a disk that is full, or of a quota that is used up."""
LARGEST = 2**40
"""No setting is as large, and no size of a model."""
KINDS = {
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISDIR: "a folder",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
"""Test of a mode -> what it is, where it is no regular file."""
UTF8 = "utf-8-sig"
"""How text of the user's is read: UTF-8, without the byte order mark that some editors put before it."""
TRIES = 100
"""How often a new folder is made anew where another process removes or takes it in the same moment."""


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder so that a reader sees each old or new, never a part of one.

    All are written under temporary names and flushed to the disk before the first is put in place.

    Args:
        folder: created where it is missing.
        files: name, or path within the folder -> content.

    Raises:
        LongtrainError: the disk is full or not writable; the old files are still there.
    """
    places = [(folder / name, content) for name, content in files.items()]
    pending = [(path.with_name(f".{path.name}.{os.getpid()}.tmp"), path, content) for path, content in places]
    try:
        for temporary, _, content in pending:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        for temporary, path, _ in pending:
            temporary.replace(path)
    except OSError as error:
        raise cannot_write(folder if len(places) > 1 else places[0][0], error) from None
    finally:
        for temporary, _, _ in pending:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write one text file whole or not at all; see `write_files`."""
    write_files(path.parent, {path.name: text.encode()})


def as_json(values: Any) -> bytes:
    """Indented JSON; NaN is refused, so that every reader can parse it."""
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def jsonl(values: list[dict[str, Any]]) -> bytes:
    """One line of JSON for each value."""
    return "".join(json.dumps(value, allow_nan=False) + "\n" for value in values).encode()


def read_bytes(path: Path) -> bytes:
    """What a file holds. Another thing in its place (a pipe, a device) is refused, since reading it may hang.

    Raises:
        OSError: there is none, it cannot be read, or it is no regular file.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(os.fstat(stream.fileno()))}", str(path))
        return stream.read()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with the line ends that it has.

    Raises:
        OSError: see `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path).decode(UTF8)


def need_regular(path: Path) -> None:
    """Refuse what is no regular file, for readers that open a path themselves.

    Raises:
        OSError: there is none, or it is a folder, a pipe or a device.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(path.stat())}", str(path))


def kind_of(status: os.stat_result) -> str:
    """What something is that stands where a regular file is wanted, for an error message."""
    for is_one, name in KINDS.items():
        if is_one(status.st_mode):
            return f"{name}, not a regular file"
    return "not a regular file"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, not UTF-8, or nested too deeply for any file of ours.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        OSError: see `read_bytes`.
        ValueError: see `parse_json`.
    """
    return parse_json(read_bytes(path))


def impossible_number(value: Any, key: str = "") -> str:
    """The first number in a JSON value that no setting or size can be, with its place; empty: there is none.

    Args:
        value: numbers, texts, lists and objects.
        key: the place of `value`, e.g. `config`.
    """
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found = (impossible_number(one, f"{key}.{name}".lstrip(".")) for name, one in pairs)
        return next(filter(None, found), "")
    if isinstance(value, int | float) and not abs(value) < LARGEST:
        shown = f"{value:.6g}" if isinstance(value, float) else f"an integer of {value.bit_length()} bits"
        return f"{key}={shown}; allowed: numbers below {LARGEST}"
    return ""


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `folder` when the block ends without an error.

    What a killed run left is settled first (see `settle`), and another process that writes `folder` is waited
    for.

    Args:
        folder: the result; replaced where it exists.

    Yields:
        An empty folder beside it.

    Raises:
        LongtrainError: writing failed (disk full, no permission); `folder` is as it was before.
    """
    fresh, old = _beside(folder)
    try:
        with _new_folder(folder):
            try:
                yield fresh
                if folder.exists():
                    folder.replace(old)
                try:
                    fresh.replace(folder)
                except OSError:
                    if old.exists():
                        old.replace(folder)
                    raise
            finally:
                if folder.exists() or not old.exists():
                    shutil.rmtree(fresh, ignore_errors=True)
                    shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if error.errno not in FULL and error.filename is None:
            raise  # of the network, say
        raise cannot_write(folder, error) from None


def settle(folder: Path, *, wait: bool = False) -> None:
    """Finish or undo the replacement of a folder that a kill has cut short, and clear away what it left.

    A killed `replaced_folder` leaves a part of the new folder (it is removed), or the whole new folder and
    the old one, neither in place (the new one is put there), or the old one beside the new (it is removed).
    A replacement that another process is at is left alone.

    Args:
        folder: what readers open; they call this first.
        wait: as a writer does: wait for another process that is replacing the folder; and clear away the part
            of a new folder also where there never was an old one.
    """
    fresh, old = _beside(folder)
    moving = old.exists() and not folder.exists()
    unfinished = fresh.exists() and (wait or folder.exists())
    if not old.exists() and not unfinished:
        return
    with _hold(fresh, wait=wait or moving) as held, suppress(OSError):
        if not held:
            return
        if old.exists() and not folder.exists():
            (fresh if fresh.exists() else old).replace(folder)
            log.info("finished what a killed run left folder=%s", folder)
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    """Where the next and the last form of a folder are while it is replaced."""
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """An empty folder beside `folder`, locked inside the block, so that no `settle` elsewhere removes it."""
    fresh, _ = _beside(folder)
    for _ in range(TRIES):  # another process may come first
        settle(folder, wait=True)
        try:
            fresh.mkdir(parents=True)
        except FileExistsError:
            continue
        with _hold(fresh, wait=True) as held:
            if not held:
                continue
            yield
            return
    raise OSError(errno.EEXIST, "cannot be cleared away; remove it", str(fresh))


@contextmanager
def _hold(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Whether this process alone may change a folder inside the block, which lasts when the folder is moved.

    Where there is no such folder, nobody else is at it. Where the file system knows no locks, one that would
    wait goes on, and one that would not leaves the folder alone.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield True
        return
    try:
        yield _lock_folder(handle, folder, wait=wait)
    finally:
        os.close(handle)


def _lock_folder(handle: int, folder: Path, *, wait: bool) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return wait
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except OSError:  # whoever had the lock has moved the folder
        return False


class Journal:
    """A file of lines that is only ever appended to, by one process at a time.

    A line is on the disk before `append` returns. The part of a line that a kill left at the end is dropped
    when the file is opened again.

    Args:
        path: of the file; its folder is created where it is missing.

    Raises:
        ConfigError: another process writes the file.
        LongtrainError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream: FileIO = path.open("ab+", buffering=0)
        except OSError as error:
            raise cannot_write(path, error) from None
        if not _locked(self._stream, path):
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

    def append(self, line: bytes) -> None:
        """Add a line (without its end), whole or not at all.

        Raises:
            LongtrainError: the disk is full or not writable; what was there before is still there.
        """
        end = self._stream.seek(0, os.SEEK_END)
        try:
            rest = line + b"\n"
            while rest:
                rest = rest[self._stream.write(rest) :]
            os.fsync(self._stream.fileno())
        except OSError as error:
            self._stream.truncate(end)
            raise cannot_write(self.path, error) from None

    def close(self) -> None:
        """Let other processes write the file."""
        self._stream.close()


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a journal; the part of one that a kill left at the end is not among them."""
    with path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield line


@contextmanager
def lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process holds a lock inside the block; False while another one does.

    Args:
        path: a file that stands for the lock; created where it is missing.
        wait: wait for the process that holds the lock, and then take it.

    Raises:
        LongtrainError: the file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise cannot_write(path, error) from None
    with stream:
        yield _locked(stream, path, wait=wait)


def free_bytes(path: Path) -> int:
    """Bytes that are free on the disk where a path is, or will be."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free


def cannot_write(path: Path, error: OSError) -> LongtrainError:
    """The error of a path that cannot be written."""
    reason = error.strerror or str(error)
    if error.filename is not None and not str(error.filename).startswith(str(path)):
        reason += f" ({error.filename})"
    if error.errno in FULL:
        reason += f" ({free_bytes(path) / 1e6:.0f} MB free)"
    return LongtrainError(
        f"cannot write {path}: {reason}; what was there is unchanged; free space, or pass home=FOLDER"
    )


def _locked(stream: Any, path: Path, *, wait: bool = False) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.warning("lock=none path=%s error=%s; let no second run write it", path, error.strerror)
    return True
