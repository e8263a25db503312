"""Which shifts documents take, and which keys each row sees: arithmetic on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from longtrain.data.rows.packed_rows import own_segments, stream


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
    drawn = torch.multinomial(law, documents, replacement=True, generator=stream(seed, 1))
    return [1 + int(j) for j in drawn]


@dataclass(frozen=True)
class Chunk:
    """Rows `start..stop` of a packed row, and where their keys are.

    Args:
        start: first row whose hidden state is wanted.
        stop: one past the last.
        halo: first row whose own K and V are needed: up to a window before `start`, in the same document.
        queries: bounds of the documents' queries, from 0 to `stop - start`.
        own_k: bounds of the documents' keys among rows `halo..stop`.
        spans: the target's keys that each document's last query sees, as its first row and one past its last.
    """

    start: int
    stop: int
    halo: int
    queries: tuple[int, ...]
    own_k: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def make_chunk(
    bounds: Sequence[int],
    shifts: Sequence[int],
    start: int,
    stop: int,
    *,
    window: int,
) -> Chunk:
    """What rows `start..stop` need: in causal, bottom-right aligned segments.

    Query i of a document with shift j sees the target's keys from the document's first row to row i - j, and
    the draft's own keys of rows i - window .. i.

    Args:
        bounds: document bounds.
        shifts: of each document.
        start: first row whose hidden state is wanted.
        stop: one past the last.
        window: previous rows that a row's self-attention sees.
    """
    own = own_segments(bounds, start, stop, window=window)
    spans = [
        (a, max(min(b, stop) - shift, a))
        for (a, b), shift in zip(pairwise(bounds), shifts, strict=True)
        if max(a, start) < min(b, stop)
    ]
    return Chunk(start, stop, own.halo, own.queries, own.keys, tuple(spans))
