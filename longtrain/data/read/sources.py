"""Reads the documents of a config's sources, and the inputs by which prepared data is found to be current."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from longtrain.data.config import SourceConfig
from longtrain.data.packing.checks import sha256_file
from longtrain.data.read.adapters import Document, adapt
from longtrain.data.read.files import (
    CODE_SUFFIXES,
    JSONL_SUFFIXES,
    TEXT_SUFFIXES,
    Report,
    find,
    find_code,
    need,
    place,
    read_jsonl,
    read_text,
    readable,
    refuse,
    stem,
)
from longtrain.data.read.licences import choose
from longtrain.data.read.manifest import Manifest, resolve, rows
from longtrain.errors import DataError

DEFAULT_ADAPTER = {"jsonl": "text", "conversations": "conversation", "tokenised": "tokenised"}
Inputs = dict[str, Any]
T = TypeVar("T")

BATCH_CHARS = 4_000_000
BATCH_DOCUMENTS = 512


def inputs(source: SourceConfig, known: Inputs | None = None, *, hashed: bool = True) -> Inputs:
    """Return the inputs that a source's documents depend on: files with sha256, or Hub datasets with commits.

    Of a folder with an installed environment they also list the packages with their licences.

    Args:
        source: a source of the config.
        known: the previous result; files of the same path, size and mtime are not hashed again, and its
            commits are used if the Hub cannot be reached.
        hashed: False lists the files by their paths alone: for readers that keep no record of them, who need
            not wait until all files have been read once.

    Raises:
        DataError: a path does not exist, or a dataset cannot be reached.
    """
    if source.reader == "synthetic":
        return {"synthetic": source.where, "options": dict(source.options)}
    if source.reader == "manifest":
        manifest = Manifest.load(need(source.where, "manifest"))
        before = {(p["hub"], p["revision"]): p["commit"] for p in (known or {}).get("parts", ())}
        parts = [{**asdict(p), "commit": resolve(p, before.get((p.hub, p.revision)))} for p in manifest.parts]
        return {"manifest": manifest.name, "parts": parts}
    seen = {item["path"]: item for item in (known or {}).get("files", ())}
    paths = _find(source)
    packages: list[dict[str, Any]] = []
    root = place(str(source.where))
    if root.is_dir() and source.licences == "permissive":
        paths, packages = choose(root, paths)
    files = [_file(path, seen.get(str(path))) if hashed else {"path": str(path)} for path in paths]
    return {"files": files, "packages": packages} if packages else {"files": files}


def digest(values: Inputs) -> str:
    """Return a hash of `inputs` that does not depend on the files' location and mtime."""
    import json

    files = [{"name": Path(f["path"]).name, "sha256": f["sha256"]} for f in values.get("files", ())]
    text = json.dumps({**values, "files": files}, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def documents(
    source: SourceConfig, found: Inputs, report: Report = refuse, *, answered: bool = True
) -> Iterator[Document]:
    """Yield the documents of a source, in a fixed order.

    Args:
        source: a source of the config; not `synthetic`, which is written from other sources' tokens.
        found: the result of `inputs` for it.
        report: called with the error of a file or row that cannot be read.
        answered: False if the target is to answer: rows of questions then need no answer.

    Raises:
        DataError: from `report`.
    """
    if source.reader == "text":
        read = _texts(source, found, report)
    else:
        rows_of = _manifest if source.reader == "manifest" else _rows
        read = rows_of(source, found, report, answered=answered)
    for document in read:
        yield replace(document, kind=source.kind or document.kind, val=held_out(source))


def held_out(source: SourceConfig) -> bool | None:
    """Return True if all documents of a source are held out, False if none is; None: by `val_fraction`."""
    return {"auto": None, "train": False, "val": True}[source.split]


def _find(source: SourceConfig) -> list[Path]:
    where = need(source.where, source.reader)
    if source.reader == "jsonl" and source.kind == "code":
        found = find_code(where)
    else:
        found = find(where, TEXT_SUFFIXES if source.reader == "text" else JSONL_SUFFIXES)
    kept = [path for path in found if not path.name.startswith(source.held_out)]
    if not kept:
        raise DataError(
            f"all {len(found)} files at {source.where} are held out; give others, or held_out: []"
        )
    return kept


def _file(path: Path, seen: Inputs | None) -> Inputs:
    stat = path.stat()
    size, time_ns = stat.st_size, stat.st_mtime_ns
    if seen and seen["sha256"] and (seen["bytes"], seen["time_ns"]) == (size, time_ns):
        return seen
    try:
        sha256 = sha256_file(path)
    except OSError:
        sha256 = ""  # the reader will raise the error
    return {"path": str(path), "bytes": size, "time_ns": time_ns, "sha256": sha256}


def _texts(source: SourceConfig, found: Inputs, report: Report) -> Iterator[Document]:
    for path in islice((Path(item["path"]) for item in found["files"]), source.rows):
        yield from _read_or_report(partial(_text, path, stem(path), "text"), report)


def _rows(source: SourceConfig, found: Inputs, report: Report, *, answered: bool) -> Iterator[Document]:
    adapter = source.adapter or DEFAULT_ADAPTER[source.reader]
    files = [Path(file["path"]) for file in found["files"]]
    if files[0].suffix.lower() in CODE_SUFFIXES:
        yield from _source_tree(place(str(source.where)), files, source, report)
        return
    named = (item for file in files for item in read_jsonl(file, report))
    for name, row in islice(named, source.rows):
        read = partial(adapt, adapter, row, source.columns, name=name, kind="", answered=answered)
        yield from _read_or_report(read, report)


def _source_tree(root: Path, files: list[Path], source: SourceConfig, report: Report) -> Iterator[Document]:
    """Yield one document for each file, named by its path in the tree."""
    for path in islice(files, source.rows):
        name = path.relative_to(root).as_posix() if path != root else path.name
        yield from _read_or_report(partial(_text, path, readable(name), "code"), report)


def _text(path: Path, name: str, kind: str) -> list[Document]:
    return [Document(name, kind, text=read_text(path))]


def _read_or_report(read: Callable[[], list[Document]], report: Report) -> list[Document]:
    """Return the documents of `read()`; none if it fails and `report` does not raise."""
    try:
        return read()
    except DataError as error:
        report(error)
        return []


def _manifest(source: SourceConfig, found: Inputs, report: Report, *, answered: bool) -> Iterator[Document]:
    parts = Manifest.load(need(source.where, "manifest")).parts
    total = sum(part.share for part in parts)
    for part, item in zip(parts, found["parts"], strict=True):
        limit = None if source.rows is None else max(1, round(source.rows * part.share / total))
        for name, row in rows(part, item["commit"], limit, report):
            columns = {**part.columns, **source.columns}
            read = partial(adapt, part.adapter, row, columns, name=name, kind=part.kind, answered=answered)
            yield from _read_or_report(read, report)


def batches(stream: Iterable[Document], chars: int = BATCH_CHARS) -> Iterator[list[Document]]:
    """Group documents into batches that end with `chars` characters or `BATCH_DOCUMENTS` documents."""
    batch: list[Document] = []
    size = 0
    for document in stream:
        batch.append(document)
        size += len(document.text or "") + sum(len(message["content"]) for message in document.messages or ())
        if size >= chars or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def groups(stream: Iterable[T], n: int) -> Iterator[list[T]]:
    """Yield a stream in lists of at most `n`."""
    left = iter(stream)
    while group := list(islice(left, n)):
        yield group
