"""Which shifts documents take, and which keys each row sees: arithmetic on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.data.rows.packed_rows import own_segments, stream
from longtrain.methods.viewed import Stretch

if TYPE_CHECKING:
    from longtrain.methods.viewed import Seen


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


def of_one_view(rows_W: Tensor, cuts: Sequence[tuple[int, int]]) -> Tensor:
    """Which rows belong to one view: bool [W].

    The others stand behind the place from which on a document is read in a view, below a root before it. What
    the target says of them follows from the view, and their keys are those of the full cache.

    Args:
        rows_W: rows of the packed row, ascending, on the host.
        cuts: that place and the shift of each document that is read in a view.
    """
    inside_W = torch.ones_like(rows_W, dtype=torch.bool)
    for cut, shift in cuts:
        inside_W &= (rows_W < cut) | (rows_W >= cut + shift - 1)
    return inside_W


@dataclass(frozen=True)
class Chunk:
    """Rows `start..stop` of a packed row, and where their keys are.

    Args:
        start: first row whose hidden state is wanted.
        stop: one past the last.
        halo: first row whose own K and V are needed: up to a window before `start`, in the same document.
        queries: bounds of the documents' queries, from 0 to `stop - start`.
        own_k: bounds of the documents' keys among rows `halo..stop`.
        cross_q: bounds of queries whose target keys are of one span; `queries` where nothing is in a view.
        spans: the target's keys that the queries between two of these bounds see, the last query all of them.
    """

    start: int
    stop: int
    halo: int
    queries: tuple[int, ...]
    own_k: tuple[int, ...]
    cross_q: tuple[int, ...]
    spans: tuple[KeySpan, ...]


@dataclass(frozen=True)
class KeySpan:
    """Keys of the target that some queries of a document see.

    Args:
        start: first row of the packed row whose keys are seen as they were written.
        stop: one past the last.
        old: positions before them that are seen as the target's cache still has them.
        document: whose.
    """

    start: int
    stop: int
    old: int = 0
    document: int = 0


def make_chunk(
    bounds: Sequence[int],
    shifts: Sequence[int],
    start: int,
    stop: int,
    *,
    window: int,
    seen: Mapping[int, Seen] | None = None,
) -> Chunk:
    """What rows `start..stop` need: in causal, bottom-right aligned segments.

    Query i of a document with shift j sees the target's keys from the document's first row to row i - j, and
    the draft's own keys of rows i - window .. i. Of a document in a view it sees what the target's cache has
    of these rows when the tree's root, row i - j + 1, is not in it yet.

    Args:
        bounds: document bounds.
        shifts: of each document.
        start: first row whose hidden state is wanted.
        stop: one past the last.
        window: previous rows that a row's self-attention sees.
        seen: documents that were read in a view.
    """
    own = own_segments(bounds, start, stop, window=window)
    cross_q, spans = [0], []
    for d, ((a, b), shift) in enumerate(zip(pairwise(bounds), shifts, strict=True)):
        first, last = max(a, start), min(b, stop)
        if first >= last:
            continue
        stretches = seen[d].stretches if seen and d in seen else (Stretch(a, b),)
        for stretch in stretches:
            end = last if stretch is stretches[-1] else min(last, stretch.stop + shift - 1)
            if end > first:
                since = a + stretch.old
                spans.append(KeySpan(since, max(end - shift, since), stretch.old, d))
                cross_q.append(end - start)
                first = end
    return Chunk(start, stop, own.halo, own.queries, own.keys, tuple(cross_q), tuple(spans))
