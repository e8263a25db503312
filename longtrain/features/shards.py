"""Documents' features on disk: safetensors shards, and for each rank an index with a line per shard.

    features.json            target, data and form of the features
    rank0.jsonl              one line a shard: its name, and each document's tokens and sha256
    rank0-000000.safetensors

A shard appears whole or not at all, and its line after it. Every rank writes shards of its own and reads all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from longtrain import files
from longtrain.errors import DataError, first_line
from longtrain.features.forms import Stored
from longtrain.journals import Journal, read_journal
from longtrain.log import get_logger
from longtrain.settings import from_file

log = get_logger(__name__)

MIB = 2**20
ADVICE = "delete the folder, and fill it again with features=fill"


@dataclass(frozen=True)
class StoredDocument:
    """Index entry of one stored document.

    Args:
        shard: file name of the shard.
        kind: "row" for a document of a batch; "probe" for a forward outside of a batch.
        outputs: the outputs that were requested of the target, in words.
        tokens: number of tokens.
        sha256: checksum of all its tensors.
        leaves: names of its tensors.
        name: name of the document in messages.
    """

    shard: str
    kind: str
    outputs: str
    tokens: int
    sha256: str
    leaves: list[str]
    name: str


class FeatureFiles:
    """A folder of features, readable and appendable.

    Args:
        folder: created when the first document is added.
        rank: rank whose files are written.
        shard_bytes: a shard is written once this many bytes are buffered.

    Raises:
        DataError: a line of an index is damaged.
    """

    def __init__(self, folder: Path, *, rank: int = 0, shard_bytes: int = 256 * MIB) -> None:
        self.folder, self.rank, self.shard_bytes = folder, rank, shard_bytes
        self._found: dict[str, StoredDocument] = {}
        self._lines: dict[Path, int] = {}
        self._waiting: dict[str, tuple[Stored, StoredDocument]] = {}
        self._bytes = 0
        self._journal: Journal | None = None
        self._open: dict[str, Any] = {}
        self._sound: set[str] = set()
        """Keys of documents whose checksum has been verified in this run, so that it is done once."""
        self.look()

    def __len__(self) -> int:
        return len(self._found) + len(self._waiting)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting or key in self._found

    def wants(self, kind: str) -> set[str]:
        """Return the output requests, in words, that documents of a kind were stored for."""
        return {one.outputs for one in self._documents() if one.kind == kind}

    @property
    def many(self) -> bool:
        """True if other ranks write to the folder too."""
        return any(index != self._index for index in self.folder.glob("rank*.jsonl"))

    def tokens(self) -> int:
        """Return the number of stored tokens."""
        return sum(one.tokens for one in self._documents())

    def size_bytes(self) -> int:
        """Return the size of the shards on disk in bytes."""
        names = {one.shard for one in self._found.values()}
        return sum((self.folder / name).stat().st_size for name in names)

    def look(self) -> None:
        """Read index lines that other processes have written since the last call."""
        for index in sorted(self.folder.glob("rank*.jsonl")):
            seen = self._lines.get(index, 0)
            for number, values in read_journal(index, advice=ADVICE, start=seen):
                self._take(index, number, values)
                self._lines[index] = number

    def read(self, key: str, name: str) -> Stored:
        """Return a document's features, on the host.

        Args:
            key: the document's key (`key_of`).
            name: name of the document in messages.

        Raises:
            DataError: the shard is damaged; the message names it and the document.
        """
        if key in self._waiting:
            return self._waiting[key][0]
        place = self._found[key]
        try:
            shard = self._shard(place.shard)
            stored = {leaf: shard.get_tensor(f"{key}/{leaf}") for leaf in place.leaves}
        except (SafetensorError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise self._damaged(place, name, reason) from None
        if key not in self._sound:
            if digest(stored) != place.sha256:
                raise self._damaged(place, name, "its checksum is another than the index says")
            self._sound.add(key)
        return stored

    def remedy(self, *, setup: bool = False) -> str:
        """Say what helps if a document is missing, or with `setup` a pass that is none of a batch."""
        return (
            "fill them with the same settings and features=fill (documents that data.stages cut must be cut "
            "alike: recut: false)"
        )

    def near(self, ids_T: Tensor) -> str:
        """Say what is stored in place of a missing document, in words; here nothing is known."""
        return ""

    def add(self, key: str, stored: Stored, *, kind: str, outputs: str, name: str) -> None:
        """Buffer a document's features; the next `flush` writes them to disk.

        Raises:
            LongtrainError: the disk is full; no part of a shard is left behind.
        """
        on_host = {leaf: tensor.detach().cpu().contiguous() for leaf, tensor in stored.items()}
        tokens = len(next(iter(on_host.values())))
        place = StoredDocument(self._next_name(), kind, outputs, tokens, digest(on_host), list(on_host), name)
        self._waiting[key] = on_host, place
        self._bytes += sum(tensor.nbytes for tensor in on_host.values())
        if self._bytes >= self.shard_bytes:
            self.flush()

    def claim(self) -> Journal:
        """Open this rank's index and lock it against other processes.

        Raises:
            ConfigError: another process writes this rank's files.
            LongtrainError: the folder cannot be written.
        """
        if self._journal is None:
            self._journal = Journal(self._index)
        return self._journal

    def flush(self) -> None:
        """Write the buffered documents as one shard, and then its index line.

        Raises:
            LongtrainError: the disk is full; no part of the shard is left behind.
        """
        if not self._waiting:
            return
        journal, name = self.claim(), self._next_name()
        tensors = {
            f"{key}/{leaf}": tensor
            for key, (stored, _) in self._waiting.items()
            for leaf, tensor in stored.items()
        }
        files.write_files(self.folder, {name: save(tensors)})
        documents = {
            key: {about: value for about, value in asdict(one).items() if about != "shard"}
            for key, (_, one) in self._waiting.items()
        }
        journal.append({"shard": name, "documents": documents})
        log.info("features shard=%s documents=%d mib=%.1f", name, len(documents), self._bytes / MIB)
        self._found |= {key: one for key, (_, one) in self._waiting.items()}
        self._lines[self._index] = self._lines.get(self._index, 0) + 1
        self._waiting, self._bytes = {}, 0

    def close(self) -> None:
        """Write the buffered documents and release this rank's index."""
        try:
            self.flush()
        finally:
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    @property
    def _index(self) -> Path:
        return self.folder / f"rank{self.rank}.jsonl"

    def _next_name(self) -> str:
        return f"rank{self.rank}-{self._lines.get(self._index, 0):06d}.safetensors"

    def _documents(self) -> Iterable[StoredDocument]:
        yield from self._found.values()
        yield from (place for _, place in self._waiting.values())

    def _take(self, index: Path, number: int, values: dict[str, Any]) -> None:
        """Add the documents of one index line, unless their shard was deleted."""
        try:
            given = {key: {"shard": values["shard"], **one} for key, one in values["documents"].items()}
            found = from_file(dict[str, StoredDocument], given)
            if Path(values["shard"]).name != values["shard"]:
                raise ValueError(f"shard {values['shard']!r} is no name of a file")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index} line {number} is damaged ({first_line(error)}); {ADVICE}") from None
        if (self.folder / values["shard"]).is_file():
            self._found |= found
        else:
            log.warning("features shard=%s is missing; documents=%d", values["shard"], len(found))

    def _shard(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt", device="cpu")
        return self._open[name]

    def _damaged(self, place: StoredDocument, name: str, reason: str) -> DataError:
        return DataError(
            f"{self.folder / place.shard} is damaged at document {name} of {place.tokens} tokens ({reason}); "
            "delete that file, and fill its documents again with features=fill"
        )


def digest(stored: Stored) -> str:
    """Return the sha256 over names, types, shapes and bytes of a document's tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(stored.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def key_of(ids_T: Tensor, outputs: str) -> str:
    """Return the key of a document: a hash of its tokens and of the outputs requested for it.

    Args:
        ids_T: token ids, int64, on the host.
        outputs: the requested outputs, in words.
    """
    found = hashlib.sha256(outputs.encode())
    found.update(ids_T.contiguous().numpy().data)
    return found.hexdigest()[:40]
