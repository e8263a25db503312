"""Prepared data on disk: token ids, label mask, an index of documents, and a manifest with hashes.

`manifest.json` is written last, into a temporary folder that is then moved into place, so a folder that has
one is complete. `checks.py` verifies a folder when it is opened.
"""

from __future__ import annotations

import json
import os
from array import array
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import numpy as np

from longtrain import files, folders
from longtrain.data.packing.checks import AGAIN, check_files, check_ids, check_index, sha256_file
from longtrain.errors import DataError, first_line
from longtrain.log import get_logger
from longtrain.settings import from_file

log = get_logger(__name__)

FORMAT = 2
"""Version of the manifest's format; data of another version is prepared again."""
HEADER_BYTES = 128
CHECKSUM = "manifest_sha256"
"""Key of a manifest that stores the checksum of all other keys."""
FILES = ("ids.npy", "mask.npy", "docs.npz", "names.txt")
PREPARED = folders.FolderKind("prepared data", ("manifest.json", "ids.npy"), (*FILES, "manifest.json"))
COLUMNS = ("start", "length", "labels", "kind", "source", "val")
_BLOCK = 2**24
"""Number of tokens that are counted at once."""


class _Column:
    """A `.npy` file that is appended to and whose header is filled in at the end.

    It uses plain writes, so that a full disk is an OSError (a full memory map would be a bus error).
    """

    def __init__(self, path: Path, dtype: Any) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.length = 0
        self.file: IO[bytes] = path.open("wb")
        self.file.write(b" " * HEADER_BYTES)

    def append(self, values: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.length += len(values)

    def close(self) -> None:
        text = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': ({self.length},), }}"
        body = text.encode().ljust(HEADER_BYTES - 11) + b"\n"
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


@dataclass
class PreparedWriter:
    """Writes documents one after the other into a folder.

    Args:
        folder: an existing, empty folder.
        vocab_size: size of the vocabulary, which decides between uint16 and uint32 ids.
    """

    folder: Path
    vocab_size: int
    starts: array[int] = field(default_factory=partial(array, "q"))
    lengths: array[int] = field(default_factory=partial(array, "q"))
    labels: array[int] = field(default_factory=partial(array, "q"))
    kinds: array[int] = field(default_factory=partial(array, "i"))
    sources: array[int] = field(default_factory=partial(array, "i"))
    val: bytearray = field(default_factory=bytearray)
    kind_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = _Column(self.folder / "ids.npy", np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        self.mask = _Column(self.folder / "mask.npy", np.uint8)
        self.names: IO[str] = (self.folder / "names.txt").open("w", encoding="utf-8")

    def add(
        self,
        ids_T: np.ndarray,
        mask_T: np.ndarray,
        *,
        name: str,
        kind: str,
        source: int = 0,
        val: bool = False,
    ) -> None:
        """Append a document.

        Args:
            ids_T: token ids, any integer type.
            mask_T: 1 where the token is a label; as long as `ids_T`.
            name: name of the document in error messages; newlines become spaces.
            kind: text kind.
            source: index into the manifest's sources.
            val: True for a held-out document.

        Raises:
            DataError: an id outside the vocabulary.
        """
        if len(ids_T) and (ids_T.min() < 0 or ids_T.max() >= self.vocab_size):
            worst = int(ids_T.max()) if ids_T.max() >= self.vocab_size else int(ids_T.min())
            raise DataError(
                f"document {name}: token id {worst} is outside the vocabulary of {self.vocab_size}"
            )
        if kind not in self.kind_names:
            self.kind_names.append(kind)
        self.starts.append(self.ids.length)
        self.lengths.append(len(ids_T))
        self.labels.append(int(np.count_nonzero(mask_T[1:])))
        self.kinds.append(self.kind_names.index(kind))
        self.sources.append(source)
        self.val.append(val)
        self.names.write(f"{as_line(name)}\n")
        self.ids.append(ids_T)
        self.mask.append(mask_T)

    def close(self, manifest: dict[str, Any]) -> None:
        """Write the index, the hashes and, last, the manifest."""
        self.ids.close()
        self.mask.close()
        self.names.close()
        columns: dict[str, np.ndarray] = {
            "start": np.asarray(self.starts, np.int64),
            "length": np.asarray(self.lengths, np.int64),
            "labels": np.asarray(self.labels, np.int64),
            "kind": np.asarray(self.kinds, np.int32),
            "source": np.asarray(self.sources, np.int32),
            "val": np.frombuffer(bytes(self.val), np.uint8).astype(bool),
        }
        with (self.folder / "docs.npz").open("wb") as file:
            np.savez(file, allow_pickle=False, **columns)
        val = columns["val"]
        counts = {
            "documents": len(self.starts),
            "tokens": self.ids.length,
            "labels": int(columns["labels"].sum()),
            "val_documents": int(val.sum()),
            "val_tokens": int(columns["length"][val].sum()),
            "longest": max(self.lengths, default=0),
        }
        body = {
            "format": FORMAT,
            "kinds": self.kind_names,
            "vocab_size": self.vocab_size,
            "counts": counts,
            **manifest,
            "sha256": {name: sha256_file(self.folder / name) for name in FILES},
        }
        body[CHECKSUM] = files.json_sha256(body)
        files.write_text(self.folder / "manifest.json", json.dumps(body, indent=1, sort_keys=True) + "\n")


def as_line(name: str) -> str:
    """Return a document's name as it is stored: in one line, never empty."""
    return " ".join(name.split()) or "unnamed"


@dataclass(frozen=True)
class _Origin:
    """The keys of a source of prepared data that are read: its place and its reader."""

    reader: str
    where: str | None


@dataclass(frozen=True)
class _Source:
    source: _Origin
    inputs: dict[str, Any]


@dataclass(frozen=True)
class _Counts:
    """The sizes of a prepared folder."""

    documents: int
    tokens: int
    labels: int
    val_documents: int
    val_tokens: int
    longest: int


@dataclass(frozen=True)
class _Manifest:
    """The keys of a prepared folder's manifest that are read; it may hold more."""

    format: int
    kinds: list[str]
    counts: _Counts
    sha256: dict[str, str]
    vocab_size: int
    pad_id: int = 0
    weights: list[float] | None = None
    sources: list[_Source] | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, open for reading.

    Args:
        folder: the folder itself.
        manifest: sources, revisions, tokenizer hash, counts, sha256.
        ids: all token ids, memory-mapped.
        mask: label mask, memory-mapped; 1: the token is a label.
        start, length, labels: offset, tokens and labels of each document; `labels` does not count its first
            token.
        kind: index of each document's text kind in `kinds`.
        source: index of each document's source in `manifest["sources"]`.
        val: True for each held-out document.
        names: name of each document.
    """

    folder: Path
    manifest: dict[str, Any]
    ids: np.ndarray
    mask: np.ndarray
    start: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    kind: np.ndarray
    source: np.ndarray
    val: np.ndarray
    names: list[str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.folder,)

    @property
    def kinds(self) -> list[str]:
        """Names of the text kinds (book, code, chat, ...), which `kind` indexes."""
        return list(self.manifest["kinds"])

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> Prepared:
        """Open a folder that `prepare` wrote.

        Args:
            folder: `${home}/data/<name>...`.
            verify: compare every file's sha256 with the manifest, once per process for unchanged files; the
                index is checked in any case.

        Raises:
            DataError: no manifest, another format, or a damaged file.
        """
        folders.finish_replacement(folder)
        if not (folder / "manifest.json").exists():
            raise DataError(f"no prepared data at {folder}; run: longtrain prepare with the same recipe")
        manifest = read_manifest(folder)
        if manifest is None:
            raise DataError(f"{folder / 'manifest.json'} is damaged, or of another format; {AGAIN}")
        try:
            if verify:
                check_files(folder, manifest.get("sha256"), FILES)
            for name in FILES:
                files.need_regular(folder / name)
            ids = np.load(folder / "ids.npy", mmap_mode="r")
            mask = np.load(folder / "mask.npy", mmap_mode="r")
            with np.load(folder / "docs.npz") as columns:
                docs = {key: columns[key] for key in COLUMNS}
            names = (folder / "names.txt").read_text(encoding="utf-8").split("\n")[:-1]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise DataError(f"prepared data at {folder} is damaged ({error}); {AGAIN}") from error
        check_index(folder, manifest, docs, ids=ids, mask=mask, names=len(names))
        if verify:
            check_ids(folder, ids, manifest["vocab_size"])
        return cls(folder=folder, manifest=manifest, ids=ids, mask=mask, names=names, **docs)

    def refuse_ids_above(self, vocab_size: int) -> None:
        """Refuse data that was made for a larger vocabulary than the target's.

        Raises:
            DataError: a token id is `vocab_size` or more.
        """
        check_ids(self.folder, self.ids, vocab_size)


def _reopened(folder: Path) -> Prepared:
    """Open a folder in a worker process whose parent has checked it."""
    return Prepared.open(folder, verify=False)


def label_counts(data: Prepared, vocab_size: int) -> np.ndarray:
    """Count how often each token is a label in the training documents (held-out ones excluded), int64."""
    counts_V = np.zeros(vocab_size, np.int64)
    held_out = [(a, a + n) for a, n in zip(data.start[data.val], data.length[data.val], strict=True)]
    for low in range(0, len(data.ids), _BLOCK):
        high = min(low + _BLOCK, len(data.ids))
        learned = data.mask[low:high] != 0
        firsts = data.start[(data.start >= low) & (data.start < high)]
        learned[firsts - low] = False
        for a, b in held_out:
            learned[max(a - low, 0) : max(b - low, 0)] = False
        counts_V += np.bincount(data.ids[low:high][learned], minlength=vocab_size)
    return counts_V


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a prepared folder, or None if it is missing, damaged or of another format."""
    try:
        manifest = files.read_json(folder / "manifest.json")
        from_file(_Manifest, manifest)
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}")
        if manifest.pop(CHECKSUM, None) != files.json_sha256(manifest):
            raise ValueError("it was changed since it was written (its checksum differs)")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("manifest=%s cannot be used: %s", folder / "manifest.json", first_line(error))
        return None
    return dict(manifest)
