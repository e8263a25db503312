"""Prompts of several lengths that end at the same points of held-out text.

Context length is compared fairly only if nothing else changes: every point is used at every length, and lies
far enough in for the longest.

Shapes: T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longtrain.errors import DataError
from longtrain.log import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.data.rows.prepared import Prepared

log = get_logger(__name__)

SPACING_TOKENS = 64
"""Least distance of two continuation points of one document."""

SUFFIXES = {
    ".txt": "text",
    ".md": "text",
    ".py": "code",
    ".c": "code",
    ".h": "code",
    ".js": "code",
}
"""File name ending -> text kind, where the name itself does not begin with a kind."""

KINDS = ("book", "code", "chat", "instruct", "web", "math")


@dataclass(frozen=True)
class HeldOutText:
    """A held-out text. `ids_T` are its tokens, without special ones."""

    name: str
    kind: str
    ids_T: np.ndarray


@dataclass(frozen=True)
class Point:
    """A place to continue from: `end` tokens of `document` lie before it."""

    document: HeldOutText
    end: int

    def prompt(self, length: int, prefix: Sequence[int] = ()) -> list[int]:
        """The `length` tokens before the point, the first ones replaced by `prefix` (begin-of-text)."""
        body = self.document.ids_T[self.end - length + len(prefix) : self.end]
        return [*prefix, *(int(token) for token in body)]


@dataclass(frozen=True)
class Selection:
    """Chosen points, and what was asked for but could not be had, by reason."""

    points: list[Point]
    dropped: dict[str, int] = field(default_factory=dict)


def documents_from_files(
    where: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kinds: Sequence[str] = (),
    prose: str = "text",
) -> list[HeldOutText]:
    """Text files as documents: one file, or every file of a folder (UTF-8), each under its kind.

    The kind is the first word of the file's or folder's name if that is one of `KINDS`, else the ending's:
    code, or `prose`. Where no file is of the kinds that are wanted, those that carry none are used.

    Args:
        where: a file or folder.
        tokenizer: the target's.
        kinds: kinds to keep; empty: all.
        prose: what to call files whose name says nothing else.

    Raises:
        DataError: nothing is there or of these kinds, or a file is not text.
    """
    return [
        HeldOutText(name, kind, np.asarray(_encode(tokenizer, text), dtype=np.int64))
        for name, kind, text in read_texts(where, kinds=kinds, prose=prose)
    ]


def read_texts(
    where: str | Path, *, kinds: Sequence[str] = (), prose: str = "text"
) -> list[tuple[str, str, str]]:
    """Name, kind and content of text files; see `documents_from_files`.

    Raises:
        DataError: nothing is there, or a file is not text.
    """
    root = Path(where).expanduser()
    files = sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES) if root.is_dir() else [root]
    if not files or not files[0].is_file():
        raise DataError(
            f"no held-out text at {root}; allowed: a text file, or a folder of {', '.join(SUFFIXES)} files"
        )
    named = {file: _kind(file, root) for file in files}
    chosen = {file: kind or prose for file, kind in named.items() if not kinds or (kind or prose) in kinds}
    if not chosen:
        chosen = {file: prose for file, kind in named.items() if kind is None}
        if not chosen:
            have = sorted({kind for kind in named.values() if kind})
            raise DataError(f"no text of kinds {list(kinds)} at {root}; kinds there: {', '.join(have)}")
        log.info("kinds=%s path=%s files=%d carry no kind and are used", list(kinds), root, len(chosen))
    return [(file.stem, kind, _read(file)) for file, kind in chosen.items()]


def documents_from_prepared(data: Prepared, *, kinds: Sequence[str] = ()) -> list[HeldOutText]:
    """The held-out split of prepared data.

    Raises:
        DataError: it has none, or none of these kinds.
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


def choose_points(
    documents: Iterable[HeldOutText], *, longest: int, count: int, margin: int = 0, seed: int = 0
) -> Selection:
    """Points with `longest` tokens before and `margin` after them, spread over kinds, documents and places.

    Kinds get equal shares, then the documents of a kind do; within a document the points are drawn one from
    each of as many equal stretches.

    Args:
        documents: where to look.
        longest: tokens needed before a point.
        count: points wanted.
        margin: tokens needed after a point.
        seed: of the draw; the choice does not depend on the shorter lengths.

    Raises:
        DataError: no document is long enough.
    """
    documents = list(documents)
    rng = np.random.default_rng(seed)
    room = [(len(doc.ids_T) - margin - longest) for doc in documents]
    usable = [index for index, free in enumerate(room) if free >= 0]
    dropped: Counter[str] = Counter()
    if short := len(documents) - len(usable):
        dropped[f"documents shorter than {longest + margin} tokens"] = short
    if not usable:
        most = max((len(doc.ids_T) for doc in documents), default=0)
        raise DataError(
            f"no held-out document has {longest} tokens of context and {margin} to continue; the longest has "
            f"{most}; pass shorter lengths or longer text (suite.text=PATH)"
        )
    most_in = [max(0, free) // SPACING_TOKENS + 1 if free >= 0 else 0 for free in room]
    taken = _shares(documents, rng.permutation(usable).tolist(), most_in, count)
    points = []
    for index in usable:
        edges = np.linspace(0, room[index] + 1, taken[index] + 1)
        for low, high in pairwise(edges):
            points.append(Point(documents[index], longest + int(low + rng.random() * (high - low))))
    if len(points) < count:
        dropped["prompts beyond what the held-out text gives"] = count - len(points)
    return Selection([points[i] for i in rng.permutation(len(points))], dict(dropped))


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


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _shares(documents: list[HeldOutText], order: list[int], most_in: list[int], count: int) -> list[int]:
    """Points of each document: kinds in turn, within a kind its documents in turn, none above its room."""
    queues: dict[str, list[int]] = {}
    for index in order:
        queues.setdefault(documents[index].kind, []).append(index)
    taken = [0] * len(documents)
    while sum(taken) < count and queues:
        for kind in sorted(queues):
            if sum(taken) == count:
                break
            index = queues[kind].pop(0)
            taken[index] += 1
            if taken[index] < most_in[index]:
                queues[kind].append(index)
            if not queues[kind]:
                del queues[kind]
    return taken


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text: {error}") from None


def _kind(file: Path, root: Path) -> str | None:
    """What a file's name, folder or ending says of its kind; None where they say nothing."""
    named = [file.stem, *file.relative_to(root).parts[:-1]] if root.is_dir() else [file.stem]
    for word in named:
        first = word.replace("-", "_").split("_")[0].lower().removesuffix("s")
        if first in KINDS:
            return first
    kind = SUFFIXES.get(file.suffix, "text")
    return None if kind == "text" else kind
