"""Segments of a packed sequence, and splitting tensors into them with one autograd node each way.

Shapes: T tokens of a packed tensor, or of each of B sequences; Q = B * T tokens end to end, H heads, D head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal


def end_to_end(x_BHTD: Tensor) -> Tensor:
    """A batch [B, H, T, D] as B segments of one packed sequence, [B * T, H, D]."""
    return x_BHTD.transpose(1, 2).flatten(0, 1)


def by_sequence(x_QH: Tensor, batch: int) -> Tensor:
    """Tokens end to end as a batch again: [B * T, H, D] -> [B, H, T, D], and [B * T, H] -> [B, H, T]."""
    return x_QH.unflatten(0, (batch, -1)).transpose(1, 2)


@dataclass(frozen=True)
class Segment:
    """Queries `q_start:q_stop` over keys `k_start:k_stop`: at least one query, and at least as many keys."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


def segments(q_bounds: Sequence[int], k_bounds: Sequence[int], n_q: int, n_k: int) -> list[Segment]:
    """The segments in which some token sees a key; leading tokens that see nothing are trimmed.

    Args:
        q_bounds: bounds in q, not decreasing, within 0..n_q.
        k_bounds: bounds in k, as many.
        n_q: number of queries.
        n_k: number of keys.

    Raises:
        DataError: bounds that decrease, leave the tensors or differ in number.
    """
    for name, bounds, n in (("q_bounds", q_bounds, n_q), ("k_bounds", k_bounds, n_k)):
        ordered = all(a <= b for a, b in pairwise(bounds))
        if not bounds or not ordered or bounds[0] < 0 or bounds[-1] > n:
            raise DataError(f"{name} {_short(bounds)} must not decrease and must stay within 0..{n}")
    if len(q_bounds) != len(k_bounds):
        raise refusal(DataError, f"{len(q_bounds)} q_bounds and {len(k_bounds)} k_bounds", "as many of each")
    found = []
    for q0, q1, k0, k1 in zip(q_bounds[:-1], q_bounds[1:], k_bounds[:-1], k_bounds[1:], strict=True):
        q0 = max(q0, q1 - (k1 - k0))
        if q0 < q1:
            found.append(Segment(q0, q1, k0, k1))
    return found


def cut(x: Tensor, spans: list[tuple[int, int]]) -> list[Tensor]:
    """Spans of x as views; one split, so the backward is one concatenation."""
    if len(spans) == 1 and spans[0] == (0, len(x)):
        return [x]
    return list(x.split(_sizes(spans, len(x)))[1::2])


def joined(x: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Spans of x concatenated; a view if they are contiguous."""
    if all(a[1] == b[0] for a, b in pairwise(spans)):
        return x[spans[0][0] : spans[-1][1]]
    return torch.cat(cut(x, spans))


def spread(x: Tensor, spans: list[tuple[int, int]], n: int) -> Tensor:
    """The inverse of `joined`: x placed at its spans of n tokens, zeros between."""
    if len(x) == n:
        return x
    sizes = _sizes(spans, n)
    pieces = list(x.split(sizes[1::2]))
    out = [x.new_zeros(sizes[0], *x.shape[1:])]
    for piece, gap in zip(pieces, sizes[2::2], strict=True):
        out += [piece, x.new_zeros(gap, *x.shape[1:])]
    return torch.cat(out)


def _sizes(spans: list[tuple[int, int]], n: int) -> list[int]:
    """gap, span, gap, span, ..., gap: lengths that add up to n."""
    sizes, at = [], 0
    for start, stop in spans:
        sizes += [start - at, stop - start]
        at = stop
    return [*sizes, n - at]


def _short(bounds: Sequence[int]) -> str:
    return str(tuple(bounds)) if len(bounds) <= 8 else f"({', '.join(map(str, bounds[:8]))}, ...)"
