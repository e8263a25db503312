"""Finds sources that prepared data of another mixture, or of an earlier state of this one, has as tokens.

A manifest stores with each source a key, the hash of all that its tokens and labels depend on: files,
tokenizer and settings, but no other source. A source of the same key is copied instead of tokenised. Copies
are complete, so that no folder depends on another, and the disk holds what it would hold without them.

Shapes: T tokens of one document.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtrain.data.packing.prepared import Prepared, read_manifest
from longtrain.errors import DataError
from longtrain.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class SourceAgain:
    """A source's documents in prepared data.

    Args:
        prepared: the data.
        number: index of the source there.
        read: what was counted when the source was read.
    """

    prepared: Prepared
    number: int
    read: Mapping[str, int]

    def documents(self) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
        """Yield name, text kind, ids_T and mask_T (bool) of each document in its order."""
        data = self.prepared
        for one in np.flatnonzero(data.source == self.number).tolist():
            of = slice(int(data.start[one]), int(data.start[one]) + int(data.length[one]))
            yield data.names[one], data.kinds[data.kind[one]], data.ids[of], data.mask[of] != 0


def tokenised_before(folder: Path, keys: Sequence[str | None], vocab_size: int) -> Mapping[int, SourceAgain]:
    """Return the sources that some prepared data has with the same key, by their index.

    Args:
        folder: where the new data goes; its former state and the other data of the same tokenizer beside it
            are looked at. Data that is damaged is logged and left alone.
        keys: each source's key; None: it is to be tokenised.
        vocab_size: number of token ids that the target knows, which must be the same.
    """
    wanted = {key: index for index, key in enumerate(keys) if key is not None}
    found: dict[int, SourceAgain] = {}
    of_tokenizer = glob.escape(folder.name.rpartition("-")[2])
    for other in sorted(folder.parent.glob(f"*-{of_tokenizer}"), key=lambda path: path != folder):
        manifest = read_manifest(other) or {}
        if manifest.get("vocab_size") != vocab_size:
            continue
        sources = manifest.get("sources") or []
        mine = [(n, wanted[one["key"]]) for n, one in enumerate(sources) if one.get("key") in wanted]
        if not (mine := [(n, index) for n, index in mine if index not in found]):
            continue
        try:
            data = Prepared.open(other)
        except DataError as error:
            log.warning("%s; its sources are tokenised again", str(error).partition("; prepare again")[0])
            continue
        if data.manifest != manifest:  # replaced in between
            continue
        found |= {index: SourceAgain(data, n, sources[n]["read"]) for n, index in mine}
    return found
