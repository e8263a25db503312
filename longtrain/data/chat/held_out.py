"""Chooses the documents that are held out for validation, by a hash of their names."""

from __future__ import annotations

import hashlib

from longtrain.data.packing.prepared import PreparedWriter, as_line
from longtrain.data.read.adapters import Document


class HeldOut:
    """Chooses held-out documents: a share of those whose source leaves it open, and one of each text kind.

    Documents of one group are held out together. The choice depends on seed, source and name alone.

    Args:
        fraction: share of the documents.
        seed: the seed of the choice.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self.fraction, self.seed = fraction, seed
        self.renamed: set[int] = set()
        """Sources of which a document is chosen by another name than the one that is stored, so that the
        choice cannot be made again from the stored ones."""
        self._nearest: dict[str, tuple[int, list[int]]] = {}

    def has(self, document: Document, source: int) -> bool:
        """Return True if a document of the source with that index is held out."""
        if document.val is not None:
            return document.val
        return self._place(document, source) < self.fraction * 2**64

    def add(self, document: Document, source: int, number: int) -> bool:
        """Return the same, and remember the document for `complete`; `number` is its index in the data."""
        if as_line(document.name) != (document.group or document.name):
            self.renamed.add(source)
        if document.val is None and self.fraction:
            self._remember(document.kind, self._place(document, source), number)
        return self.has(document, source)

    def complete(self, writer: PreparedWriter) -> None:
        """Hold out one document of each text kind that has none held out, so that `eval` finds text of it."""
        for kind, (_, nearest) in self._nearest.items():
            same = [n for n, number in enumerate(writer.kinds) if writer.kind_names[number] == kind]
            if len(same) > len(nearest) and not any(writer.val[n] for n in same):
                for n in nearest:
                    writer.val[n] = True

    def _remember(self, kind: str, place: int, number: int) -> None:
        """Remember the document (with its group) of each kind that came closest to being held out."""
        least, numbers = self._nearest.get(kind, (place, []))
        if place < least:
            least, numbers = place, []
        if place == least:
            numbers.append(number)
        self._nearest[kind] = (least, numbers)

    def _place(self, document: Document, source: int) -> int:
        """Return a document's pseudo-random number below 2**64; those with the lowest are held out."""
        name = document.group or document.name
        draw = hashlib.sha256(f"{self.seed}:{source}:{name}".encode()).digest()
        return int.from_bytes(draw[:8], "big")
