"""Spans of observing queries and their prefix keys, and work tables for the kernels' programs.

Tables are built on the host, copied without waiting for the device, and cached: every layer uses the same.
Shapes: I work items, U blocks of queries, N observing queries.
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
"""Cached tables of each kind; a packed sequence of documents makes about ten."""


@dataclass(frozen=True)
class Span:
    """The observing queries of one prompt and the keys that all of them see; numbers on the host.

    Args:
        rows: start and stop in the N queries (and their own K and V).
        seq: index of the sequence in the first dimension of the prefix keys.
        keys: start and stop of the prefix in that sequence's T keys.
    """

    rows: tuple[int, int]
    seq: int
    keys: tuple[int, int]


@lru_cache(maxsize=_KEPT)
def check_spans(spans: tuple[Span, ...], n_rows: int, n_seqs: int, n_slots: int) -> None:
    """Refuse spans that skip queries, exceed the tensors or share prefix keys.

    Raises:
        DataError: the spans' queries are not contiguous from 0 to n_rows with at least one in each; keys out
            of range; a sequence that does not exist; two spans over the same keys.
    """
    at = 0
    for span in spans:
        if span.rows[0] != at or span.rows[1] <= at:
            raise refusal(
                DataError, f"span queries {span.rows} after query {at}", "each span starts there, 1 or more"
            )
        at = span.rows[1]
        if not 0 <= span.keys[0] <= span.keys[1] <= n_slots or not 0 <= span.seq < n_seqs:
            raise refusal(DataError, f"{span}", f"sequences below {n_seqs} and keys within 0..{n_slots}")
    if at != n_rows or not spans:
        raise refusal(DataError, f"spans of {at} of {n_rows} queries", "spans that cover all queries")
    used = sorted((span.seq, *span.keys) for span in spans if span.keys[0] < span.keys[1])
    for (seq, _, stop), (other, start, _) in pairwise(used):
        if seq == other and start < stop:
            raise DataError(f"two spans share keys {start}..{stop} of sequence {seq}; call once for each")


def most_rows(spans: Sequence[Span]) -> int:
    """Number of queries of the largest span."""
    return max(span.rows[1] - span.rows[0] for span in spans)


def covers(spans: Sequence[Span], n_seqs: int, n_slots: int) -> bool:
    """True if the spans' prefixes, which share no key, cover all keys of all sequences."""
    return sum(span.keys[1] - span.keys[0] for span in spans) == n_seqs * n_slots


@lru_cache(maxsize=_KEPT)
def row_items(
    spans: tuple[Span, ...], rows: int, keys: int, programs: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Work items of kernels whose programs process a block of queries and loop over a piece of its keys.

    Args:
        spans: checked spans.
        rows: number of queries of a block.
        keys: pieces are multiples of this number of keys.
        programs: approximate number of items that fills the device.
        device: the device of the tables.

    Returns:
        items_I8: first query, stop query, sequence, first key, stop key, first and stop index of the own
            keys, queries of the span; a block's items are consecutive, and only the last of them sees own
            keys.
        blocks_U4: first query, stop query, first item, number of items.
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
    """Work items of kernels whose programs process a piece of the prefix and loop over the queries.

    Args:
        spans: checked spans.
        keys: pieces are multiples of this number of keys.
        programs: approximate number of items that fills the device; 0: pieces of exactly `keys`.
        device: the device of the table.

    Returns:
        items_I6: sequence, first key, stop key, first query, stop query, number of queries in the mean.
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
    """Work items like those of `key_items`, over blocks of the observing queries' own keys.

    Own keys are causal: a block is seen by its span's queries from the block's first position on.
    """
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
