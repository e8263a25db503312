"""Running text for measurements: files, folders, prepared data, or a corpus of `data_prep` from the Hub.

`texts` yields named plain texts; held-out documents also have a kind, such as book or code.

Shapes: T tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longtrain.assets import asset_dir
from longtrain.data.packing.prepared import Prepared, read_manifest
from longtrain.data.read.adapters import adapt
from longtrain.data.read.files import (
    BUNDLED,
    JSONL_SUFFIXES,
    PACKED_SUFFIXES,
    TEXT_SUFFIXES,
    find,
    place,
    read_jsonl,
    read_text,
    stem,
    visible,
)
from longtrain.data.read.manifest import Manifest, resolve, rows
from longtrain.errors import ConfigError, DataError
from longtrain.log import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = get_logger(__name__)

SUFFIXES = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "code",
    ".c": "code",
    ".h": "code",
    ".js": "code",
}
"""File suffix -> kind of text, for files whose name does not begin with a kind."""

KINDS = ("book", "code", "chat", "instruct", "web", "math")


@dataclass(frozen=True)
class Tokens:
    """Token ids of a text, without special tokens, and the number of bytes that the first 0, 1, ... tokens
    cover.
    """

    name: str
    ids_T: np.ndarray
    bytes_T: np.ndarray


def texts(where: str, *, like: str | None = None, limit: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield (name, text) in a fixed order.

    Args:
        where: a file or folder of text or JSON lines (plain or packed), `bundled:FOLDER`, or a corpus of
            `data_prep` by its name. A path that exists on disk takes precedence.
        like: the corpus whose adapter and columns parse JSON lines; None: each line has a field `text`.
        limit: the maximum number of texts.

    Raises:
        ConfigError: `where` does not exist.
        DataError: a damaged file, a line without its text, or the Hub does not answer.
    """
    path = Path(os.path.expandvars(where)).expanduser()
    if where.startswith(BUNDLED) or path.exists():
        yield from islice(_local(where, like), limit)
        return
    known = corpora()
    if where not in known:
        raise ConfigError(
            f"no text at {where}; pass a file or folder of text or JSON lines, bundled:heldout, "
            f"prepared data, or a corpus of data_prep: {', '.join(known)}"
        )
    (part,) = Manifest.load(where).parts
    try:
        for name, row in rows(part, resolve(part), limit):
            for document in adapt(part.adapter, row, part.columns, name=name, kind=part.kind):
                yield document.name, document.text or ""
    except DataError as error:
        raise DataError(
            f"corpus {where}: {error.__cause__ or error}; a local copy can be given by its path"
        ) from error


def corpora() -> list[str]:
    """Names of the corpora in `data_prep` whose examples are plain text in one field."""
    found = []
    for file in sorted(asset_dir("data_prep").glob("*.yaml")):
        parts = Manifest.load(file.stem).parts
        if len(parts) == 1 and parts[0].adapter == "text":
            found.append(file.stem)
    return found


def tokenise(tokenizer: PreTrainedTokenizerBase, name: str, text: str) -> Tokens:
    """Tokenise a text.

    A token covers the bytes up to the end of its last character; a tokenizer without character offsets
    (a slow one) decodes each token instead.
    """
    if not tokenizer.is_fast:
        ids = plain_ids(tokenizer, text)
        return Tokens(name, np.asarray(ids, np.int64), _decoded_bytes(tokenizer, ids))
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = np.asarray([end for _, end in made.offset_mapping], np.int64)
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (letters > 0x7F).astype(np.int64) + (letters > 0x7FF) + (letters > 0xFFFF)
    before = np.concatenate(([0], np.cumsum(sizes)))
    bytes_T = (
        np.concatenate(([0], np.maximum.accumulate(before[ends]))) if len(ends) else np.zeros(1, np.int64)
    )
    return Tokens(name, np.asarray(made.input_ids, np.int64), bytes_T)


def prepared_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokens] | None:
    """Iterate over the held-out documents of prepared data; None if the folder is not prepared data.

    Raises:
        DataError: the data is damaged, or has no held-out document.
    """
    if read_manifest(folder) is None:
        return None
    return (
        Tokens(one.name, one.ids_T, _decoded_bytes(tokenizer, one.ids_T.tolist()))
        for one in documents_from_prepared(Prepared.open(folder))
    )


@dataclass(frozen=True)
class HeldOutText:
    """A held-out text. `ids_T` are its token ids, without special tokens."""

    name: str
    kind: str
    ids_T: np.ndarray


def documents_from_files(
    where: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kinds: Sequence[str] = (),
    prose: str = "text",
) -> list[HeldOutText]:
    """Read text files as documents: one file, or every file of a folder (UTF-8), each with its kind.

    The kind is the first word of the file's or folder's name if that is one of `KINDS`, else that of the
    suffix: code, or `prose`. If no file has one of the requested kinds, files without a stated kind are used.

    Args:
        where: a file or folder, or `bundled:FOLDER`.
        tokenizer: the target's.
        kinds: kinds to read; empty: all.
        prose: the kind of files whose name states none.

    Raises:
        DataError: there is no file, none of these kinds, or a file is not text.
    """
    return [
        HeldOutText(name, kind, np.asarray(plain_ids(tokenizer, text), dtype=np.int64))
        for name, kind, text in read_texts(where, kinds=kinds, prose=prose)
    ]


def text_files(where: str | Path) -> list[Path]:
    """The files of held-out text at a path (`data.read.files.place`): the file itself, or those of a folder.

    Raises:
        DataError: nothing is there.
    """
    root = _root(where)
    files = [p for p in visible(root) if _ending(p) in SUFFIXES] if root.is_dir() else [root]
    if not files or not files[0].is_file():
        raise DataError(
            f"no held-out text at {root}; allowed: a text file, or a folder of {', '.join(SUFFIXES)} files, "
            "plain, .xz, .gz or .zst"
        )
    return files


def read_texts(
    where: str | Path, *, kinds: Sequence[str] = (), prose: str = "text"
) -> list[tuple[str, str, str]]:
    """Read text files as (name, kind, content); see `documents_from_files`.

    Skipped files of a folder are logged. A file of JSON lines gives one text per line.

    Raises:
        DataError: there is no file, a file is not text, or a line has no field `text`.
    """
    chosen = files_of_kinds(where, kinds=kinds, prose=prose)
    if _root(where).is_dir():
        find(str(where), tuple(SUFFIXES))
    if kinds and not {*kinds} & {*chosen.values()}:
        log.info("kinds=%s path=%s files=%d carry no kind and are used", list(kinds), where, len(chosen))
    found = [(kind, one) for file, kind in chosen.items() for one in _contents(file, _plain(file).stem, {})]
    return [(name, kind, text) for kind, (name, text) in found]


def files_of_kinds(where: str | Path, *, kinds: Sequence[str] = (), prose: str = "text") -> dict[Path, str]:
    """Map text files of the requested kinds to their kinds, without reading them. See `documents_from_files`.

    Raises:
        DataError: there is no file, or none of these kinds.
    """
    root = _root(where)
    named = {file: _kind(file, root) for file in text_files(where)}
    chosen = {file: kind or prose for file, kind in named.items() if not kinds or (kind or prose) in kinds}
    chosen = chosen or {file: prose for file, kind in named.items() if kind is None}
    if not chosen:
        have = sorted({kind for kind in named.values() if kind})
        raise DataError(
            f"no text of suite.kinds={list(kinds)} at {root}; kinds there: {', '.join(have)}; pass "
            f"suite.kinds=[{','.join(have)}], or suite.kinds=[] (all)"
        )
    return chosen


def documents_from_prepared(data: Prepared, *, kinds: Sequence[str] = ()) -> list[HeldOutText]:
    """Read the held-out split of prepared data.

    Raises:
        DataError: there is no held-out split, or no document of these kinds in it.
    """
    rows = [int(row) for row in np.flatnonzero(data.val)]
    if not rows:
        raise DataError(
            f"prepared data at {data.folder} has no held-out documents; set data.val_fraction above 0"
        )
    documents = [
        HeldOutText(
            data.names[row],
            data.kinds[data.kind[row]],
            np.asarray(data.ids[data.start[row] : data.start[row] + data.length[row]], dtype=np.int64),
        )
        for row in rows
        if not kinds or data.kinds[data.kind[row]] in kinds
    ]
    if not documents:
        have = sorted({data.kinds[data.kind[row]] for row in rows})
        raise DataError(
            f"no held-out documents of kinds {list(kinds)} at {data.folder}; kinds: {', '.join(have)}"
        )
    return documents


def has_held_out(data: Prepared, kinds: Sequence[str] = ()) -> bool:
    """True if prepared data has a held-out document, or one of these kinds."""
    have = {data.kinds[number] for number in data.kind[np.asarray(data.val, dtype=bool)]}
    return bool(have & {*kinds} if kinds else have)


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text, without special ones."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def prefix_of(tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The special tokens that the tokenizer puts before a text, if any."""
    if tokenizer is None:
        return []
    plain = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    for start in range(len(full)):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []


def _root(where: str | Path) -> Path:
    """The file or folder that `where` names, whether it exists or not."""
    if str(where).startswith(BUNDLED):
        return place(str(where))
    return Path(os.path.expandvars(where)).expanduser()


def _local(where: str, like: str | None) -> Iterator[tuple[str, str]]:
    part = Manifest.load(like).parts[0] if like else None
    for file in find(where, (*TEXT_SUFFIXES, *JSONL_SUFFIXES)):
        yield from _contents(file, stem(file), part.columns if part else {})


def _contents(file: Path, name: str, columns: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, content) of a text file, or of each line of a JSON-lines file.

    Args:
        file: text or JSON lines, plain or compressed.
        name: the name of a text file; JSON lines are named by their file and line number.
        columns: column names of the lines, see `adapt`.
    """
    if _ending(file) not in JSONL_SUFFIXES:
        yield name, read_text(file)
        return
    for row_name, row in read_jsonl(file):
        for document in adapt("text", row, columns, name=row_name, kind=""):
            yield document.name, document.text or ""


def _decoded_bytes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> np.ndarray:
    sizes = [len(str(tokenizer.decode([token])).encode()) for token in ids]
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))


def _plain(file: Path) -> Path:
    """A file's name without the suffix of its compression."""
    return file.with_suffix("") if file.suffix.lower() in PACKED_SUFFIXES else file


def _ending(file: Path) -> str:
    """A file's suffix in lower case, ignoring the suffix of its compression."""
    return _plain(file).suffix.lower()


def _kind(file: Path, root: Path) -> str | None:
    """The kind of text that a file's name, folder or suffix states; None if they state none."""
    named = [_plain(file).stem, *file.relative_to(root).parts[:-1]] if root.is_dir() else [_plain(file).stem]
    for word in named:
        first = word.replace("-", "_").split("_")[0].lower().removesuffix("s")
        if first in KINDS:
            return first
    kind = SUFFIXES.get(_ending(file), "text")
    return None if kind == "text" else kind
