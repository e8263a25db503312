"""Continuation tasks: held-out text is continued from the same points with several context lengths.

For a fair comparison of context lengths, every point is used at every length, and therefore lies
far enough into its document for the longest.

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

from longtrain.assets import asset_dir
from longtrain.data.packing.prepare import tokenizer_hash
from longtrain.data.packing.prepared import Prepared, read_manifest
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.corpora import (
    HeldOutText,
    documents_from_files,
    documents_from_prepared,
    has_held_out,
    prefix_of,
    read_texts,
)
from longtrain.evaluation.records import ids_sha256
from longtrain.evaluation.suites.drafted import drafted
from longtrain.evaluation.suites.shared import check_lengths
from longtrain.evaluation.task import Example, Task
from longtrain.log import get_logger
from longtrain.tables import tokens

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

HELD_OUT = "text/heldout"
"""The bundled held-out files: novels that no target or draft of this package was trained on."""

SPACING_TOKENS = 64
"""Minimum distance of two continuation points of one document."""


@dataclass(frozen=True)
class Point:
    """A position to continue from: `end` tokens of `document` precede it."""

    document: HeldOutText
    end: int

    def prompt(self, length: int, prefix: Sequence[int] = ()) -> list[int]:
        """The `length` tokens before the point, the first ones replaced by `prefix` (begin-of-text)."""
        body = self.document.ids_T[self.end - length + len(prefix) : self.end]
        return [*prefix, *(int(token) for token in body)]


@dataclass(frozen=True)
class Selection:
    """The chosen points, and the number of points that could not be found, by reason."""

    points: list[Point]
    dropped: dict[str, int] = field(default_factory=dict)


def choose_points(
    documents: Iterable[HeldOutText], *, longest: int, count: int, margin: int = 0, seed: int = 0
) -> Selection:
    """Choose points with `longest` tokens before and `margin` after them, spread over kinds, documents and
    positions.

    Kinds get equal shares, then the documents of a kind; within a document one point is drawn from
    each of as many equal stretches.

    Args:
        documents: documents to choose from.
        longest: tokens needed before a point.
        count: number of points to choose.
        margin: tokens needed after a point.
        seed: the random seed; the choice does not depend on the shorter lengths.

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


def continuations(
    points: Sequence[Point],
    lengths: Sequence[int],
    target: Target,
    *,
    max_new_tokens: int,
    ignore_eos: bool = False,
    name: str = "{}",
) -> list[Task]:
    """Make a task for each context length.

    Args:
        points: the ends of the prompts, the same at every length.
        lengths: lengths of the prompts in tokens.
        target: its tokenizer supplies the begin-of-text tokens.
        max_new_tokens: the maximum number of tokens of a continuation.
        ignore_eos: continue past the end-of-text token.
        name: template of task names; `{}` is replaced by the length.

    Raises:
        ConfigError: a length beyond the target's context window.
    """
    check_lengths(lengths, max_new_tokens, target)
    prefix = prefix_of(target.tokenizer)

    def at(length: int) -> Task:
        prompts = [point.prompt(length, prefix) for point in points]
        return drafted(
            name.format(tokens(length)),
            [(_row(i, *both), both[1]) for i, both in enumerate(zip(points, prompts, strict=True))],
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            facets_of=lambda row: {"length": length, "kind": str(row.fields["kind"])},
            protocol={"lengths": [length]},
        )

    return [at(length) for length in lengths]


def held_out(
    target: Target, where: str | None, kinds: Sequence[str], *, home: str = ".", data: str | None = None
) -> list[HeldOutText]:
    """Read documents that no draft was trained on.

    Args:
        target: a target with a tokenizer.
        where: a file or folder, `bundled`, or `data`; None: the held-out documents of prepared data if there
            are any, else the bundled text.
        kinds: kinds of text; empty: all.
        home: the folder of prepared data.
        data: the name of the prepared data.

    Raises:
        ConfigError: `data` without a name, or the target has no tokenizer.
        DataError: there is no text.
    """
    tokenizer = target.require_tokenizer()
    if where in (None, "data"):
        if where == "data" and data is None:
            raise ConfigError("suite.text=data needs data=NAME, or pass a file, a folder or bundled")
        folder = Path(home) / "data" / f"{data}-{tokenizer_hash(tokenizer)[:8]}"
        manifest = read_manifest(folder) if data is not None else None
        if where == "data" or manifest is not None:
            held_out = Prepared.open(folder)
            if where == "data" or has_held_out(held_out, kinds):
                log.info("text=%s (held-out documents)", folder)
                return documents_from_prepared(held_out, kinds=kinds)
            log.warning("no held-out documents of kinds=%s in %s; the bundled text is used", kinds, folder)
    bundled = where in (None, "bundled")
    path = asset_dir("bundled") / HELD_OUT if bundled else Path(str(where))
    log.info("text=%s", path)
    prose = "book" if bundled else "text"  # the bundled excerpt is from novels
    return documents_from_files(path, tokenizer, kinds=kinds, prose=prose)


def texts_of(where: str | None, kinds: Sequence[str]) -> dict[str, str]:
    """Held-out texts by name; files of the same name in different folders are numbered.

    Args:
        where: a file or folder; None: the bundled text.
        kinds: kinds of text; empty: all.

    Raises:
        DataError: there is no text.
    """
    texts: dict[str, str] = {}
    for name, _, text in read_texts(where or asset_dir("bundled") / HELD_OUT, kinds=kinds, prose="book"):
        while name in texts:
            name = f"{name} ({len(texts) + 1})"
        texts[name] = text
    return texts


def _row(number: int, point: Point, prompt: Sequence[int]) -> Example:
    fields = {
        "number": number,
        "document": point.document.name,
        "kind": point.document.kind,
        "end": point.end,
        "sha256": ids_sha256(prompt),
    }
    return Example(f"{number:04d}", fields)


def _shares(documents: list[HeldOutText], order: list[int], most_in: list[int], count: int) -> list[int]:
    """Number of points per document: kinds in turn, within a kind its documents in turn, limited by their
    room.
    """
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
