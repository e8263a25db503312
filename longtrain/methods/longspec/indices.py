"""Draws the documents' shifts and finds the keys that each position sees, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from longtrain.data.packing.packed_sequences import own_segments, stream


def draw_shifts(documents: int, *, weights: Sequence[float], seed: int) -> list[int]:
    """Draw the flash noisy shift of each document: 1 + an index drawn from `weights`.

    Position i of a document with shift j sees the target's keys of positions 0..i-j. That is what a node at
    depth j-1 of a drafted tree sees, since the target has not read the tree's root yet.

    Args:
        documents: number of documents.
        weights: relative weight of shift 1, 2, ...
        seed: seed of the micro-batch.

    Source: LongSpec §3.2, "Flash Noisy Training".
    Note: one draw for each document and not for each micro-batch; the range is the configured depth (the
        authors' code stops at 4, and so never trains the deepest level of its own tree).
    """
    probs = torch.tensor(weights, dtype=torch.float64)
    drawn = torch.multinomial(probs, documents, replacement=True, generator=stream(seed, 1))
    return [1 + int(j) for j in drawn]


@dataclass(frozen=True)
class Chunk:
    """Positions `start..stop` of a packed sequence, and the ranges of keys that they see.

    Args:
        start: first position whose hidden state is computed.
        stop: one past the last.
        halo: first position whose own K and V are needed: up to a window before `start`, in the same
            document.
        queries: bounds of the documents' queries, from 0 to `stop - start`.
        own_k: bounds of the documents' keys among positions `halo..stop`.
        spans: the target's keys that each document's last query sees, as first position and one past the
            last.
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
    """Find the keys that positions `start..stop` see, as causal, bottom-right aligned segments.

    Query i of a document with shift j sees the target's keys from the document's first position to i - j, and
    the draft's own keys of positions i - window .. i.

    Args:
        bounds: document bounds.
        shifts: shift of each document.
        start: first position whose hidden state is computed.
        stop: one past the last.
        window: previous tokens that a position's self-attention sees.
    """
    own = own_segments(bounds, start, stop, window=window)
    spans = [
        (a, max(min(b, stop) - shift, a))
        for (a, b), shift in zip(pairwise(bounds), shifts, strict=True)
        if max(a, start) < min(b, stop)
    ]
    return Chunk(start, stop, own.halo, own.queries, own.keys, tuple(spans))
