"""Which positions documents take, and which keys each row sees: pure arithmetic on the host.

Shapes: T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Spans = tuple[tuple[int, int], ...]


def draw_shifts(documents: int, *, weights: Sequence[float], seed: int) -> list[int]:
    """Flash noisy shift of each document: 1 + a draw from `weights`.

    Row i of a document with shift j sees the target's keys of rows 0..i-j: what a node at depth j-1 of a
    drafted tree sees, since the target has not read the tree's root yet.

    Args:
        documents: how many.
        weights: relative weight of shift 1, 2, ...
        seed: the micro-batch's.

    Source: LongSpec §3.2, "Flash Noisy Training".
    Note: one draw for each document and not for each micro-batch; the range is the configured depth (the
        authors' code stops at 4, and so never trains the deepest level of its own tree).
    """
    law = torch.tensor(weights, dtype=torch.float64)
    drawn = torch.multinomial(law, documents, replacement=True, generator=_generator(seed, 1))
    return [1 + int(j) for j in drawn]


def draw_offsets(lengths: Sequence[int], *, usable: int, max_doc_tokens: int = 0, seed: int) -> list[int]:
    """Anchor-Offset: how far each document is moved, uniform on 0..max(usable - length, 0).

    Args:
        lengths: of the documents, tokens.
        usable: positions stay below this.
        max_doc_tokens: longer documents are not moved; 0: no limit.
        seed: the micro-batch's.

    Source: LongSpec §3.2, "Anchor-Offset Indices".
    """
    coins = torch.rand(len(lengths), dtype=torch.float64, generator=_generator(seed, 2)).tolist()
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


@dataclass(frozen=True)
class Chunk:
    """Rows `start..stop` of a packed row, and where their keys are.

    Args:
        start: first row whose hidden state is wanted.
        stop: one past the last.
        halo: first row whose own K and V are needed: up to a window before `start`, in the same document.
        queries: bounds of the documents' queries, from 0 to `stop - start`.
        own_k: bounds of the documents' keys among rows `halo..stop`.
        cross_k: bounds of the target's keys once the spans are put one after another.
        spans: rows of the target's K and V that each document's queries see, the last query all of them.
    """

    start: int
    stop: int
    halo: int
    queries: tuple[int, ...]
    own_k: tuple[int, ...]
    cross_k: tuple[int, ...]
    spans: Spans


def make_chunk(bounds: Sequence[int], shifts: Sequence[int], start: int, stop: int, *, window: int) -> Chunk:
    """What rows `start..stop` need: in causal, bottom-right aligned segments.

    Query i of a document with shift j sees the target's keys from the document's first row to row i - j, and
    the draft's own keys of rows i - window .. i.
    """
    halo = start
    n_q, n_k, spans = [], [], []
    for (a, b), shift in zip(pairwise(bounds), shifts, strict=True):
        first, last = max(a, start), min(b, stop)
        if first >= last:
            continue
        own = max(a, start - window) if first == start else a
        halo = min(halo, own)
        n_q.append(last - first)
        n_k.append(last - own)
        spans.append((a, max(last - shift, a)))
    q = (0, *accumulate(n_q))
    k = (0, *accumulate(n_k))
    cross = (0, *accumulate(b - a for a, b in spans))
    return Chunk(start, stop, halo, q, k, cross, tuple(spans))


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


def _generator(seed: int, purpose: int) -> torch.Generator:
    """One stream for each purpose, so that switching one off leaves the other as it was."""
    return torch.Generator().manual_seed((seed * 4 + purpose) % 2**63)
