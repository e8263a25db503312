"""Positions, chunks and segments of packed rows that drafts are trained on: pure arithmetic on the host.

Shapes: T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


def draw_offsets(lengths: Sequence[int], *, usable: int, max_doc_tokens: int = 0, seed: int) -> list[int]:
    """Anchor-Offset: how far each document is moved, uniform on 0..max(usable - length, 0).

    Args:
        lengths: of the documents, tokens.
        usable: positions stay below this.
        max_doc_tokens: longer documents are not moved; 0: no limit.
        seed: the micro-batch's.

    Source: LongSpec §3.2, "Anchor-Offset Indices".
    """
    coins = torch.rand(len(lengths), dtype=torch.float64, generator=stream(seed, 2)).tolist()
    rooms = [max(usable - n, 0) if not max_doc_tokens or n <= max_doc_tokens else 0 for n in lengths]
    return [min(int(u * (room + 1)), room) for u, room in zip(coins, rooms, strict=True)]


def positions(bounds: Sequence[int], *, offsets: Sequence[int] | None = None, anchors: int = 0) -> Tensor:
    """Rotary positions of a packed row, int64_T on the host: documents start at 0, offset past anchors."""
    parts = []
    for d, (a, b) in enumerate(pairwise(bounds)):
        pos = torch.arange(b - a)
        if offsets is not None:
            pos[anchors:] += offsets[d]
        parts.append(pos)
    return torch.cat(parts)


def cut(rows: Tensor, chunk_tokens: int) -> list[tuple[int, int]]:
    """Ranges of at most `chunk_tokens` rows that together hold all wanted rows.

    Args:
        rows: wanted rows, int64, ascending, on the host.
        chunk_tokens: rows of a range; 0: one range.

    Returns: (start, stop) pairs, each beginning and ending with a wanted row; stretches without are skipped.
    """
    if not len(rows):
        return []
    if not chunk_tokens:
        return [(int(rows[0]), int(rows[-1]) + 1)]
    ranges, at = [], 0
    while at < len(rows):
        start = int(rows[at])
        end = int(torch.searchsorted(rows, start + chunk_tokens))
        ranges.append((start, int(rows[end - 1]) + 1))
        at = end
    return ranges


@dataclass(frozen=True)
class OwnSegments:
    """The keys that rows of a chunk see among their documents' own rows: causal, bottom-right aligned.

    Args:
        halo: the first row whose keys are needed; they run on to the end of the chunk.
        queries: bounds of the documents' queries, from 0 to the chunk's length.
        keys: bounds of the documents' keys, counted from `halo`.
    """

    halo: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]


def own_segments(bounds: Sequence[int], start: int, stop: int, *, window: int | None) -> OwnSegments:
    """Where the keys of rows `start..stop` are: `window` rows before the first one, or its whole document.

    Args:
        bounds: document bounds of the packed row.
        start: the chunk's first row.
        stop: one past its last.
        window: rows before its own that a row may see; None: all of its document.
    """
    halo = start
    n_q, n_k = [], []
    for a, b in pairwise(bounds):
        first, last = max(a, start), min(b, stop)
        if first >= last:
            continue
        own = a if window is None or first > start else max(a, start - window)
        halo = min(halo, own)
        n_q.append(last - first)
        n_k.append(last - own)
    return OwnSegments(halo, (0, *accumulate(n_q)), (0, *accumulate(n_k)))


def stream(seed: int, purpose: int) -> torch.Generator:
    """One stream for each purpose, so that switching one off leaves the other as it was."""
    return torch.Generator().manual_seed((seed * 4 + purpose) % 2**63)
