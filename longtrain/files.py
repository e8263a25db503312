"""Writes files atomically, reads files without blocking on pipes or devices, and locks between processes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from longtrain.errors import LongtrainError
from longtrain.former_names import with_new_names
from longtrain.log import get_logger

log = get_logger(__name__)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a full disk or an exhausted quota."""
LARGEST = 2**40
"""Upper limit of numbers in settings and model sizes; a larger one is refused as impossible."""
LARGEST_TEXT = 2**28
"""Largest JSON, YAML or text file that is read into memory, in bytes."""
KINDS = {
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISDIR: "a folder",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
"""Test of a file mode -> name of that kind of non-regular file."""
CHECKSUM = "sha256"
"""Key of a JSON file that stores the checksum of all its other keys."""
UTF8 = "utf-8-sig"
"""The encoding of users' text files: UTF-8, without the byte order mark that some editors write."""


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder atomically: a reader sees each file either old or new, never partly written.

    All are written under temporary names and flushed to the disk before the first is renamed. A symbolic link
    is kept, and the file it points to is written.

    Args:
        folder: the folder, created if it is missing.
        files: name or relative path -> content.

    Raises:
        LongtrainError: the disk is full or not writable; the old files are still there.
    """
    places = [(Path(os.path.realpath(folder / name)), content) for name, content in files.items()]
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
        raise cannot_write(folder if len(places) > 1 else folder / next(iter(files)), error) from None
    finally:
        for temporary, _, _ in pending:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write one text file atomically; see `write_files`."""
    write_files(path.parent, {path.name: text.encode()})


def as_json(values: Any) -> bytes:
    """Return values as indented JSON. NaN is refused, because standard JSON has none."""
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def json_sha256(values: Any) -> str:
    """Return the hex sha256 of JSON values, independent of key order and white space."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def jsonl(values: list[dict[str, Any]]) -> bytes:
    """Return JSON lines, one for each value."""
    return "".join(json.dumps(value, allow_nan=False) + "\n" for value in values).encode()


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a file descriptor of a regular file; a pipe or a device is refused instead of blocking.

    Args:
        path: path of the file.
        flags: flags of `os.open`; `O_CREAT` creates a missing file.

    Raises:
        OSError: the file is missing, cannot be opened, or is not regular.
    """
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG((status := os.fstat(handle)).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, f"it is {kind_of(status)}", str(path))


def read_bytes(path: Path, *, most: int | None = None) -> bytes:
    """Return the content of a file.

    Args:
        path: path of the file.
        most: largest size in bytes; None: no limit.

    Raises:
        OSError: the file is missing, unreadable, too large or not regular (see `open_regular`).
    """
    with os.fdopen(open_regular(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", str(path))
        return stream.read()


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file of at most `LARGEST_TEXT` bytes, line ends unchanged.

    Raises:
        OSError: see `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, most=LARGEST_TEXT).decode(UTF8)


def need_regular(path: Path) -> None:
    """Refuse a path that is not a regular file, for readers that open the path themselves.

    Raises:
        OSError: the path is missing, or is a folder, a pipe or a device.
    """
    if not stat.S_ISREG((status := path.stat()).st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(status)}", str(path))


def kind_of(status: os.stat_result) -> str:
    """Name the kind of a path that is not a regular file, for an error message."""
    for is_one, name in KINDS.items():
        if is_one(status.st_mode):
            return f"{name}, not a regular file"
    return "not a regular file"


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: the text is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: see `read_bytes`.
        ValueError: see `parse_json`.
    """
    return parse_json(read_bytes(path, most=LARGEST_TEXT))


def read_json_if_whole(path: Path) -> Any:
    """Parse a JSON file; None if it does not exist or is damaged (for example by a kill)."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def sealed(values: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file that includes a checksum of its own content."""
    content = json.loads(json.dumps(values, default=str))
    content.pop(CHECKSUM, None)
    return (json.dumps({**content, CHECKSUM: json_sha256(content)}, indent=2) + "\n").encode()


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a file written with `sealed`, and verify its checksum.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no checksum, or was changed since it was written.
    """
    content = read_json(path)
    if not isinstance(content, dict) or CHECKSUM not in content:
        raise ValueError("it has no checksum of its own content")
    return _unsealed(content)


def _unsealed(content: dict[str, Any]) -> dict[str, Any]:
    """Remove the checksum from a sealed file's values, and verify it."""
    if content.pop(CHECKSUM) != json_sha256(content):
        raise ValueError("it was changed since it was written (the checksum of its content differs)")
    return content


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file written with `sealed`, and verify its checksum; former keys have their new names.

    Files of early versions of longtrain have no checksum. They are accepted with a warning, because hours of
    work may be in them and nothing indicates damage.

    Raises:
        OSError: it cannot be read.
        ValueError: the file is not a JSON object, or was changed since it was written.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    if CHECKSUM in content:
        return with_new_names(_unsealed(content))
    log.warning(
        "%s was written by an earlier longtrain, without a checksum; it is taken as it is, and nothing shows "
        "whether it was edited since",
        path,
    )
    return with_new_names(content)


def impossible_number(value: Any, key: str = "") -> str:
    """Return the first impossible number (too large, or not finite) in a JSON value, with its key; else "".

    Args:
        value: a JSON value, nested or not.
        key: the key of `value`, e.g. `config`.
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
def lock(path: Path, *, wait: bool = False, read_only: bool = False) -> Iterator[bool]:
    """Context manager that holds a lock between processes; yields False if another process holds it.

    Args:
        path: the lock file, created if it is missing.
        wait: wait until the lock is free, then take it.
        read_only: continue without a lock if the folder is read-only, since nobody can change it.

    Raises:
        LongtrainError: the file cannot be created, or is not regular.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if not (read_only and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)):
            raise cannot_write(path, error) from None
        yield True
        return
    with os.fdopen(handle, "w") as stream:
        yield try_lock(stream, path, wait=wait)


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist yet."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free


def cannot_write(path: Path, error: OSError) -> LongtrainError:
    """Build the error of a path that cannot be written."""
    reason = error.strerror or str(error)
    if error.filename is not None and not str(error.filename).startswith(str(path)):
        reason += f" ({error.filename})"
    if error.errno in FULL:
        reason += f" ({free_bytes(path) / 1e6:.0f} MB free)"
    return LongtrainError(
        f"cannot write {path}: {reason}; what was there is unchanged; free space, or pass home=FOLDER"
    )


def try_lock(stream: Any, path: Path, *, wait: bool = False) -> bool:
    """Lock an open file; False if another process has the lock. True if the file system has no locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.warning("lock=none path=%s error=%s; let no second run write it", path, error.strerror)
    return True
