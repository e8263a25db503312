"""Which rows observe which keys, and the tables that tell a kernel's programs so.

Tables are built on the host, copied without waiting for the device, and kept: every layer asks for the same.
Shapes: I programs' items, U row blocks, N observing rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal

_KEPT = 128
"""Tables kept of each kind; a packed row of documents makes about ten."""


@dataclass(frozen=True)
class Span:
    """The observing rows of one prompt and the keys that all of them see; numbers on the host.

    Args:
        rows: start and stop in the N rows (of q and of the rows' own K and V).
        seq: sequence in the first dim of the prefix keys.
        keys: start and stop of the prefix in that sequence's T slots.
    """

    rows: tuple[int, int]
    seq: int
    keys: tuple[int, int]


@lru_cache(maxsize=_KEPT)
def check_spans(spans: tuple[Span, ...], n_rows: int, n_seqs: int, n_slots: int) -> None:
    """Refuse spans that leave rows out, leave the tensors or share prefix keys.

    Raises:
        DataError: rows of the spans do not follow one another from 0 to n_rows at least one in each; keys
            outside the slots; a sequence that is not there; two spans over the same keys.
    """
    at = 0
    for span in spans:
        if span.rows[0] != at or span.rows[1] <= at:
            raise refusal(
                DataError, f"span rows {span.rows} after row {at}", "each span starts there, 1 or more"
            )
        at = span.rows[1]
        if not 0 <= span.keys[0] <= span.keys[1] <= n_slots or not 0 <= span.seq < n_seqs:
            raise refusal(DataError, f"{span}", f"sequences below {n_seqs} and keys within 0..{n_slots}")
    if at != n_rows or not spans:
        raise refusal(DataError, f"spans of {at} rows for {n_rows} queries", "spans that cover all rows")
    used = sorted((span.seq, *span.keys) for span in spans if span.keys[0] < span.keys[1])
    for (seq, _, stop), (other, start, _) in pairwise(used):
        if seq == other and start < stop:
            raise DataError(f"two spans share keys {start}..{stop} of sequence {seq}; call once for each")


def most_rows(spans: Sequence[Span]) -> int:
    """Rows of the largest span."""
    return max(span.rows[1] - span.rows[0] for span in spans)


def covers(spans: Sequence[Span], n_seqs: int, n_slots: int) -> bool:
    """Whether the spans' prefixes, which share no key, are all the slots of all sequences."""
    return sum(span.keys[1] - span.keys[0] for span in spans) == n_seqs * n_slots


@lru_cache(maxsize=_KEPT)
def row_items(
    spans: tuple[Span, ...], rows: int, keys: int, programs: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Work of the kernels whose programs own a block of rows and walk over a piece of its keys.

    Args:
        spans: checked spans.
        rows: rows of a block.
        keys: the pieces are multiples of so many keys.
        programs: about so many items fill the device.
        device: the device of the tables.

    Returns:
        items_I8: first row, stop row, sequence, first key, stop key, first and stop row of the own keys, rows
            of the span; a block's items follow one another, and only the last of them sees own keys.
        blocks_U4: first row, stop row, first item, number of items.
    """
    blocks = [(row, min(row + rows, span.rows[1]), span) for span in spans for row in range(*span.rows, rows)]
    total = sum(span.keys[1] - span.keys[0] for _, _, span in blocks)
    piece = max(_up(total, programs), 2 * keys)
    items: list[tuple[int, ...]] = []
    table: list[tuple[int, ...]] = []
    for row, stop, span in blocks:
        (low, high), first, n = span.keys, span.rows[0], span.rows[1] - span.rows[0]
        pieces = max(1, _up(high - low, piece))
        size = _up(_up(high - low, pieces), keys) * keys
        starts = list(range(low, high, size)) if high > low else [low]
        table.append((row, stop, len(items), len(starts)))
        for start in starts:
            own = stop if start == starts[-1] else first
            items.append((row, stop, span.seq, start, min(start + size, high), first, own, n))
    return _table(items, device), _table(table, device)


@lru_cache(maxsize=_KEPT)
def key_items(spans: tuple[Span, ...], keys: int, programs: int, device: torch.device) -> Tensor:
    """Work of the kernels whose programs own a piece of the prefix and walk over the rows.

    Args:
        spans: checked spans.
        keys: the pieces are multiples of so many keys.
        programs: about so many items fill the device; 0: pieces of exactly `keys`.
        device: the device of the table.

    Returns: items_I6: sequence, first key, stop key, first row, stop row, rows that the mean divides by.
    """
    total = sum(span.keys[1] - span.keys[0] for span in spans)
    size = keys * max(1, _up(_up(total, programs), keys) if programs else 1)
    return _table(
        [
            (span.seq, start, min(start + size, span.keys[1]), *span.rows, span.rows[1] - span.rows[0])
            for span in spans
            for start in range(*span.keys, size)
        ],
        device,
    )


@lru_cache(maxsize=_KEPT)
def own_items(spans: tuple[Span, ...], keys: int, device: torch.device) -> Tensor:
    """Work over the rows' own keys: items_I6 as of `key_items`; the rows start at the block's first key."""
    return _table(
        [
            (0, start, min(start + keys, span.rows[1]), start, span.rows[1], span.rows[1] - span.rows[0])
            for span in spans
            for start in range(*span.rows, keys)
        ],
        device,
    )


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """An int32 table on the device; from pinned memory, so that the host does not wait."""
    table = torch.tensor(rows, dtype=torch.int32)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _up(a: int, b: int) -> int:
    return -(-a // b)
