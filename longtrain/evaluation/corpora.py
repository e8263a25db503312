"""Running text for measurements: files, folders, prepared data, or a corpus of `data_prep` from the Hub.

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
from longtrain.data.read.adapters import adapt
from longtrain.data.read.files import (
    BUNDLED,
    JSONL_SUFFIXES,
    TEXT_SUFFIXES,
    find,
    read_jsonl,
    read_text,
    stem,
)
from longtrain.data.read.manifest import Manifest, resolve, rows
from longtrain.data.rows.prepared import Prepared, read_manifest
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.contexts import documents_from_prepared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Tokens:
    """A text's tokens, without special ones, and how many bytes of text the first 0, 1, ... of them are."""

    name: str
    ids_T: np.ndarray
    bytes_T: np.ndarray


def texts(where: str, *, like: str | None = None, limit: int | None = None) -> Iterator[tuple[str, str]]:
    """Named texts, in a fixed order.

    Args:
        where: a file or folder of text or JSON lines (plain, .xz or .gz), `bundled:FOLDER`, or a corpus of
            `data_prep` by its name. What exists on disk goes first.
        like: the corpus whose adapter and columns read JSON lines; None: rows with a field `text`.
        limit: most texts.

    Raises:
        ConfigError: nothing is there.
        DataError: a damaged file, a row without its text, or the Hub does not answer.
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
    """Corpora of `data_prep` whose rows are plain text in one part."""
    found = []
    for file in sorted(asset_dir("data_prep").glob("*.yaml")):
        parts = Manifest.load(file.stem).parts
        if len(parts) == 1 and parts[0].adapter == "text":
            found.append(file.stem)
    return found


def tokenise(tokenizer: PreTrainedTokenizerBase, name: str, text: str) -> Tokens:
    """Tokenise a text.

    A token's bytes are those up to the end of its last character; a tokenizer that does not say where that is
    (a slow one) is asked for the text of each token instead.
    """
    if not tokenizer.is_fast:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
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
    """The held-out documents of prepared data, one by one; None where the folder is none.

    Raises:
        DataError: it is damaged, or has no held-out document.
    """
    if read_manifest(folder) is None:
        return None
    return (
        Tokens(one.name, one.ids_T, _decoded_bytes(tokenizer, one.ids_T.tolist()))
        for one in documents_from_prepared(Prepared.open(folder))
    )


def _local(where: str, like: str | None) -> Iterator[tuple[str, str]]:
    part = Manifest.load(like).parts[0] if like else None
    for file in find(where, (*TEXT_SUFFIXES, *JSONL_SUFFIXES)):
        if not file.name.removesuffix(".xz").removesuffix(".gz").endswith(JSONL_SUFFIXES):
            yield stem(file), read_text(file)
            continue
        for name, row in read_jsonl(file):
            for document in adapt("text", row, part.columns if part else {}, name=name, kind=""):
                yield document.name, document.text or ""


def _decoded_bytes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> np.ndarray:
    sizes = [len(str(tokenizer.decode([token])).encode()) for token in ids]
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
