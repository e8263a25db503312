"""Files that appear whole or not at all, readers that no file can hang, and locks between processes."""

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
from longtrain.log import get_logger

log = get_logger(__name__)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a disk that is full, or of a quota that is used up."""
LARGEST = 2**40
"""No setting is as large, and no size of a model."""
LARGEST_TEXT = 2**28
"""Bytes of a JSON, YAML or text file that is read as a whole; none of ours comes near."""
KINDS = {
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISDIR: "a folder",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
"""Test of a mode -> what it is, where it is no regular file."""
CHECKSUM = "sha256"
"""The key of a JSON file that holds the checksum of all its others."""
UTF8 = "utf-8-sig"
"""How text of the user's is read: UTF-8, without the byte order mark that some editors put before it."""


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder so that a reader sees each old or new, never a part of one.

    All are written under temporary names and flushed to the disk before the first is put in place. A name
    that is a symbolic link stays one: what it leads to is written.

    Args:
        folder: created where it is missing.
        files: name, or path within the folder -> content.

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
    """Write one text file whole or not at all; see `write_files`."""
    write_files(path.parent, {path.name: text.encode()})


def as_json(values: Any) -> bytes:
    """Indented JSON; NaN is refused, so that every reader can parse it."""
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def json_sha256(values: Any) -> str:
    """Hex sha256 of JSON values, whatever the order of their keys and the white space of the file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def jsonl(values: list[dict[str, Any]]) -> bytes:
    """One line of JSON for each value."""
    return "".join(json.dumps(value, allow_nan=False) + "\n" for value in values).encode()


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A handle of a regular file. Another thing in its place (a pipe, a device) is refused, not waited for.

    Args:
        path: of the file.
        flags: of `os.open`; with `O_CREAT` the file is made where it is missing.

    Raises:
        OSError: there is none, it cannot be opened, or it is no regular file.
    """
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG((status := os.fstat(handle)).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, f"it is {kind_of(status)}", str(path))


def read_bytes(path: Path, *, most: int | None = None) -> bytes:
    """What a file holds.

    Args:
        path: of the file.
        most: bytes that it may have; None: as many as there are.

    Raises:
        OSError: there is none, it cannot be read, is larger, or is no regular file (see `open_regular`).
    """
    with os.fdopen(open_regular(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", str(path))
        return stream.read()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file of at most `LARGEST_TEXT` bytes, with the line ends that it has.

    Raises:
        OSError: see `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, most=LARGEST_TEXT).decode(UTF8)


def need_regular(path: Path) -> None:
    """Refuse what is no regular file, for readers that open a path themselves.

    Raises:
        OSError: there is none, or it is a folder, a pipe or a device.
    """
    if not stat.S_ISREG((status := path.stat()).st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(status)}", str(path))


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
    return parse_json(read_bytes(path, most=LARGEST_TEXT))


def sealed(values: Mapping[str, Any]) -> bytes:
    """A JSON file that holds the checksum of its own content."""
    content = json.loads(json.dumps(values, default=str))
    content.pop(CHECKSUM, None)
    return (json.dumps({**content, CHECKSUM: json_sha256(content)}, indent=2) + "\n").encode()


def read_sealed(path: Path) -> dict[str, Any]:
    """The content of a file that `sealed` made.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or was changed since.
    """
    content = read_json(path)
    if not isinstance(content, dict) or CHECKSUM not in content:
        raise ValueError("it has no checksum of its own content")
    return _unsealed(content)


def _unsealed(content: dict[str, Any]) -> dict[str, Any]:
    """Take the checksum out of a sealed file's values, and compare it with them."""
    if content.pop(CHECKSUM) != json_sha256(content):
        raise ValueError("it was changed since it was written (the checksum of its content differs)")
    return content


def read_results(path: Path) -> dict[str, Any]:
    """The content of a file of results, as `sealed` made it.

    One that an earlier longtrain wrote has no checksum. It is taken with a warning: hours of work are in it,
    and nothing shows that it is damaged.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON object, or was changed since it was written.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    if CHECKSUM in content:
        return _unsealed(content)
    log.warning(
        "%s was written by an earlier longtrain, without a checksum; it is taken as it is, and nothing shows "
        "whether it was edited since",
        path,
    )
    return content


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
def lock(path: Path, *, wait: bool = False, read_only: bool = False) -> Iterator[bool]:
    """Whether this process holds a lock inside the block; False while another one does.

    Args:
        path: a file that stands for the lock; created where it is missing.
        wait: wait for the process that holds the lock, and then take it.
        read_only: go on without a lock where the place may only be read: nothing is changed there then.

    Raises:
        LongtrainError: the file cannot be made, or is no regular file.
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


def try_lock(stream: Any, path: Path, *, wait: bool = False) -> bool:
    """Whether this process has the lock of an open file now; without locks in the file system, it goes on."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.warning("lock=none path=%s error=%s; let no second run write it", path, error.strerror)
    return True
