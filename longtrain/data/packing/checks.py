"""Checks of prepared data: hashes of files, an index that fits them, ids in the vocabulary.

Hashing reads every byte, at one to two GB/s, so it is done once in a process for files that did not change.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from longtrain.errors import DataError
from longtrain.files import need_regular
from longtrain.progress import Progress

AGAIN = "prepare again: longtrain prepare with the same recipe finds the damage and writes the folder anew"
SHOWN_BYTES = 4 * 10**9
"""Progress is shown when more bytes than this are hashed."""
_BLOCK_BYTES = 2**22
_BLOCK_TOKENS = 2**20

File = tuple[str, int, int, int]
"""Path, inode, size in bytes, and time of the last change in ns."""
_hashes: dict[File, str] = {}
"""sha256 of the files that this process has hashed."""
_highest: dict[File, int] = {}
"""The highest token id of the files that this process has scanned."""


def check_files(folder: Path, hashes: Any, names: Sequence[str] = (), *, again: str = AGAIN) -> None:
    """Compare files with the hashes that were recorded when they were written.

    Args:
        folder: folder of the files.
        hashes: the manifest's mapping of file name -> hex sha256.
        names: files that must have a hash.
        again: end of the error message, with the command that repairs damage.

    Raises:
        DataError: a file has no hash, or differs from it.
        OSError: a file is missing, cannot be read, or is a pipe or a device.
    """
    if not isinstance(hashes, Mapping) or any(not isinstance(hashes.get(name), str) for name in names):
        raise DataError(f"{folder} was written without checksums of its files; {again}")
    total = sum(_key(folder / name)[2] for name in hashes)
    shown = Progress(total // 10**6, 0, "MB", bar=False) if total > SHOWN_BYTES else nullcontext()
    with shown as progress:
        for name, digest in hashes.items():
            if _read_sha256(folder / name, progress) != digest:
                raise DataError(f"{folder / name} is damaged: its sha256 is not its manifest's; {again}")


def check_index(
    folder: Path,
    manifest: Mapping[str, Any],
    docs: Mapping[str, np.ndarray],
    *,
    ids: np.ndarray,
    mask: np.ndarray,
    names: int,
) -> None:
    """Refuse an index that does not fit the tokens; documents must follow each other without a gap.

    Args:
        folder: the prepared folder, for messages.
        manifest: manifest of the folder.
        docs: arrays `start`, `length`, `labels`, `kind`, `source` and `val`, with a value for each document.
        ids: all token ids.
        mask: the label mask.
        names: number of document names.

    Raises:
        DataError: the first error found.
    """
    counts, kinds = manifest["counts"], manifest["kinds"]
    if len(ids) != counts.get("tokens") or len(mask) != len(ids) or names != len(docs["start"]):
        raise DataError(f"prepared data at {folder} is cut short; {AGAIN}")
    start, length, labels = docs["start"], docs["length"], docs["labels"]
    shapes = {array.shape for array in docs.values()} == {(names,)} and ids.ndim == mask.ndim == 1
    whole = all(docs[key].dtype.kind == ("b" if key == "val" else "i") for key in docs)
    wrong = ""
    if not shapes or not whole or ids.dtype.kind != "u" or mask.dtype != np.uint8:
        wrong = "columns of other shapes or types than prepare writes"
    elif names and length.min() < 0:
        wrong = f"a document of length {length.min()}"
    elif not np.array_equal(start, np.cumsum(length) - length) or length.sum() != len(ids):
        wrong = "documents that overlap or leave a gap"
    elif names and (labels.min() < 0 or (labels > np.maximum(length - 1, 0)).any()):
        wrong = "a document with more labels than tokens, or fewer than none"
    elif names and not 0 <= docs["kind"].min() <= docs["kind"].max() < len(kinds):
        wrong = "a document of a kind that the manifest does not name"
    elif names and not 0 <= docs["source"].min() <= docs["source"].max() < len(manifest.get("weights", [0])):
        wrong = "a document of a source that the manifest gives no weight"
    elif int(length.max(initial=0)) != counts.get("longest"):
        wrong = f"another longest document than the manifest's {counts.get('longest')}"
    if wrong:
        raise DataError(f"{folder / 'docs.npz'} is damaged: it has {wrong}; {AGAIN}")


def check_ids(folder: Path, ids: np.ndarray, vocab_size: int) -> None:
    """Refuse token ids outside a vocabulary.

    Args:
        folder: where `ids.npy` is.
        ids: all token ids.
        vocab_size: the size of the vocabulary.

    Raises:
        DataError: there is one.
    """
    if (highest := _highest.get(key := _key(folder / "ids.npy"))) is None:
        highest = max((int(block.max()) for block in _blocks(folder / "ids.npy", ids)), default=-1)
        if _mtime_is_final(key):
            _highest[key] = highest
    if highest >= vocab_size:
        raise DataError(
            f"{folder / 'ids.npy'} holds token id {highest}, outside the vocabulary of {vocab_size}; take "
            "the tokenizer files and the chat template that came with the target's weights, and prepare again"
        )


def _blocks(path: Path, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yield all ids of a `.npy` file, block by block.

    They are read, not mapped, since pages of a map count as this process's memory.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(path.stat().st_size - ids.nbytes)
        while len(block := np.fromfile(file, ids.dtype, _BLOCK_TOKENS)):
            yield block


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file's bytes.

    Raises:
        OSError: it cannot be read, or is a pipe or a device.
    """
    return _read_sha256(path, None)


def _read_sha256(path: Path, progress: Progress | None) -> str:
    if (key := _key(path)) in _hashes:
        return _hashes[key]
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            if progress is not None:
                progress.advance(f"checking {path.name}", len(block) // 10**6)
    if _mtime_is_final(key):
        _hashes[key] = digest.hexdigest()
    return digest.hexdigest()


def _key(path: Path) -> File:
    need_regular(path)
    about = path.stat()
    return str(path.absolute()), about.st_ino, about.st_size, about.st_mtime_ns


def _mtime_is_final(file: File) -> bool:
    """True once the mtime is old enough that a later change must alter it (file systems round mtimes)."""
    return time.time_ns() - file[3] > 2 * 10**9
