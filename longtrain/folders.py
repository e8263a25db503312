"""Folders that appear whole or not at all, and take the place of nothing but an older one of their kind."""

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
"""Files that a kill, a file system or a download left in a folder of ours."""
TRIES = 100
"""How often a new folder is made anew where another process removes or takes it in the same moment."""


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that longtrain writes as a whole, and how one is known, so that no other is replaced.

    Args:
        what: it is called in messages: `an artifact`.
        marks: files or folders of which every folder of the kind holds one.
        names: patterns of all files that it may hold (see `fnmatch`), each as deep as it has slashes.
    """

    what: str
    marks: tuple[str, ...]
    names: tuple[str, ...]

    def refuse_other(self, folder: Path) -> None:
        """Refuse to replace what is not of this kind, or holds a file that nothing here wrote.

        Raises:
            LongtrainError: what stands in the way.
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
        """What shows that a folder is not of this kind; empty where nothing does."""
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
    """A new folder to write into, which takes the place of `folder` when the block ends without an error.

    What a killed run left is settled first (see `settle`), and another process that writes `folder` is waited
    for. Where `folder` is a symbolic link, the folder that it leads to is replaced, and the link stays.

    Args:
        folder: the result; replaced where it exists and is of the same kind.
        kind: of the folder.

    Yields:
        An empty folder beside it.

    Raises:
        LongtrainError: writing failed (disk full, no permission), or something else stands in its place;
            `folder` is as it was before.
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
    folder = Path(os.path.realpath(folder))
    if not folder.name:  # the root, which nobody replaces
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
    """Where a folder really is, or will be: links are followed, and `..` is taken as the system takes it.

    Raises:
        LongtrainError: it is a link into a folder that is not there.
    """
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
    """Remove a folder with all in it; a link or a file is removed itself, and never what a link leads to."""
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


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
    except OSError:  # whoever had the lock has moved the folder
        return False
