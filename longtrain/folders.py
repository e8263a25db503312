"""Writes folders atomically; a folder replaces only an older one of the same kind."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from longtrain.errors import LongtrainError
from longtrain.files import FULL, cannot_write, kind_of
from longtrain.log import get_logger

log = get_logger(__name__)

LEFT = (".*.tmp", ".DS_Store", ".nfs*", ".gitattributes", ".cache/huggingface/*")
"""Patterns of files that a killed process, a file system or a download may leave in an output folder."""
TRIES = 100
"""Attempts to create the new folder, which another process may remove or take at the same moment."""


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that longtrain writes, and how to recognise one, so that no other folder is replaced.

    Args:
        what: its name in messages, with an article: `an artifact`.
        marks: names that identify the kind: every folder of it holds at least one of these files or folders.
        names: patterns of all files that it may hold (see `fnmatch`); a pattern matches at the depth of its
            slashes.
    """

    what: str
    marks: tuple[str, ...]
    names: tuple[str, ...]

    def refuse_other(self, folder: Path) -> None:
        """Refuse to replace a folder that is not of this kind, or holds a file that longtrain did not write.

        Raises:
            LongtrainError: the message names the folder or the file.
        """
        if not folder.exists():
            return
        if folder.is_dir():
            reason = self._foreign(folder)
        else:
            reason = "is a file" if folder.is_file() else f"is {kind_of(folder.stat())}"
        if reason:
            raise LongtrainError(
                f"{folder} exists and is not replaced by {self.what}, since it {reason}; move it, or choose "
                "another name"
            )

    def _foreign(self, folder: Path) -> str:
        """Return the reason why a folder is not of this kind; empty if it is."""
        inside = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        for name in sorted(path.relative_to(folder).as_posix() for path in inside):
            depth = name.count("/")
            if not any(fnmatchcase(name, one) and one.count("/") == depth for one in (*self.names, *LEFT)):
                return f"holds {name}, which is no part of one"
        if inside and not any((folder / mark).exists() for mark in self.marks):
            return f"has no {' or '.join(self.marks)}"
        return ""


@contextmanager
def replaced_folder(folder: Path, kind: FolderKind) -> Iterator[Path]:
    """Context manager that yields a new folder, which replaces `folder` if the block ends without an error.

    A replacement that a killed run left half done is finished first (see `finish_replacement`), and the call
    waits for another process that writes `folder`. If `folder` is a symbolic link, the folder that it points
    to is replaced, and the link is kept.

    Args:
        folder: the final path; an existing folder of the same kind is replaced.
        kind: the kind of the folder.

    Yields:
        An empty folder beside `folder`.

    Raises:
        LongtrainError: writing failed (disk full, no permission), or `folder` is of another kind; it is
            unchanged then.
    """
    place = _place(folder)
    fresh, old = _beside(place)
    try:
        kind.refuse_other(place)
        with _new_folder(place):
            try:
                yield fresh
                kind.refuse_other(place)
                if place.exists():
                    place.replace(old)
                try:
                    fresh.replace(place)
                except OSError:
                    if old.exists():
                        old.replace(place)
                    raise
            finally:
                if place.exists() or not old.exists():
                    _remove(fresh)
                    _remove(old)
    except OSError as error:
        if error.errno not in FULL and error.filename is None:
            raise  # not about this disk, e.g. a network error
        raise cannot_write(folder, error) from None


def finish_replacement(folder: Path, *, wait: bool = False) -> None:
    """Finish or undo a replacement of a folder that was cut short by a kill, and remove its leftovers.

    A killed `replaced_folder` leaves an incomplete new folder (which is removed), or the complete new folder
    and the old one with neither in place (the new one is moved there), or the old one beside the new (the old
    one is removed). A replacement that another process is running is not touched.

    Args:
        folder: the final path. Readers call this before they open it.
        wait: used by writers: wait for another process that is replacing the folder, and remove an incomplete
            new folder even if there never was an old one.
    """
    folder = Path(os.path.realpath(folder))
    if not folder.name:  # the root folder is never replaced
        return
    fresh, old = _beside(folder)
    moving = old.exists() and not folder.exists()
    unfinished = os.path.lexists(fresh) and (wait or folder.exists())
    if not os.path.lexists(old) and not unfinished:
        return
    with _hold(fresh, wait=wait or moving) as held, suppress(OSError):
        if not held:
            return
        if old.exists() and not folder.exists():
            (fresh if fresh.exists() else old).replace(folder)
            log.info("finished what a killed run left folder=%s", folder)
        for left in (fresh, old):
            _remove(left)


def _place(folder: Path) -> Path:
    """Return the real path of a folder that may not exist yet, with links and `..` resolved."""
    place = Path(os.path.realpath(folder))
    if not place.name:
        raise LongtrainError(f"cannot write {folder}: it is the root of the file system; choose another")
    if folder.is_symlink() and not place.parent.is_dir():
        raise LongtrainError(
            f"cannot write {folder}: it is a link to {place}, and {place.parent} is not there; make that "
            "folder (mount its disk), or remove the link"
        )
    return place


def _remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link (never the link's target)."""
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    """Return the temporary paths of the new and the old folder during a replacement."""
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make an empty folder beside `folder`, locked so that no other `finish_replacement` removes it."""
    fresh, _ = _beside(folder)
    for _ in range(TRIES):  # another process may come first
        finish_replacement(folder, wait=True)
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
    """Context manager that locks a folder, even while it is moved; yields False if another process has it.

    A missing folder counts as free. On a file system without locks the result is `wait`: writers proceed, and
    readers leave the folder alone.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_NONBLOCK)
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
    except OSError:  # the process that had the lock has moved the folder
        return False
