"""Positions, chunks and segments of packed sequences that drafts are trained on, computed on the host.

Shapes: T tokens of a packed sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


def draw_offsets(lengths: Sequence[int], *, usable: int, max_doc_tokens: int = 0, seed: int) -> list[int]:
    """Draw a position offset for each document (Anchor-Offset), uniform on 0..max(usable - length, 0).

    Args:
        lengths: tokens of each document.
        usable: number of positions; positions stay below this.
        max_doc_tokens: longer documents are not moved; 0: no limit.
        seed: seed of the micro-batch.

    Source: LongSpec §3.2, "Anchor-Offset Indices".
    """
    rng = torch.rand(len(lengths), dtype=torch.float64, generator=stream(seed, 2)).tolist()
    rooms = [max(usable - n, 0) if not max_doc_tokens or n <= max_doc_tokens else 0 for n in lengths]
    return [min(int(u * (room + 1)), room) for u, room in zip(rng, rooms, strict=True)]


def positions(bounds: Sequence[int], *, offsets: Sequence[int] | None = None, anchors: int = 0) -> Tensor:
    """Return the rotary positions of a packed sequence, int64_T on the host.

    Every document starts at 0. Its first `anchors` tokens stay there; the others are moved by its offset.
    """
    parts = []
    for d, (a, b) in enumerate(pairwise(bounds)):
        pos = torch.arange(b - a)
        if offsets is not None:
            pos[anchors:] += offsets[d]
        parts.append(pos)
    return torch.cat(parts)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy to a device, through page-locked memory so that the host does not wait for a GPU."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def cut(rows: Tensor, chunk_tokens: int) -> list[tuple[int, int]]:
    """Split a sequence into ranges of at most `chunk_tokens` tokens that cover the given positions.

    Args:
        rows: positions to cover, int64, ascending, on the host.
        chunk_tokens: tokens of a range; 0: one range.

    Returns:
        (start, stop) pairs, each beginning and ending with one of the positions; stretches without any are
            skipped.
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
    """The keys that a chunk's queries attend to within their own documents: causal, bottom-right aligned.

    Args:
        halo: the first position whose keys are needed; the keys run on to the end of the chunk.
        queries: bounds of the documents' queries, from 0 to the chunk's length.
        keys: bounds of the documents' keys, counted from `halo`.
    """

    halo: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]


def own_segments(bounds: Sequence[int], start: int, stop: int, *, window: int | None) -> OwnSegments:
    """Return the keys that tokens `start..stop` attend to: the last `window`, or their whole documents.

    Args:
        bounds: document bounds of the packed sequence.
        start: the chunk's first token.
        stop: one past its last token.
        window: previous tokens that a token attends to; None: all of its document.
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
    """Return a random generator for one purpose, so that switching one off leaves the others unchanged."""
    return torch.Generator().manual_seed((seed * 4 + purpose) % 2**63)
