"""Positions, shifts and visible sets against their definitions."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from longtrain.data.packing import packed_sequences
from longtrain.methods.longspec import indices


def definition(bounds, shifts, window):
    """Pairs (row, key row) that may be seen: of the target's keys and of the draft's own."""
    cross, own = set(), set()
    for (a, b), shift in zip(pairwise(bounds), shifts, strict=True):
        for i in range(a, b):
            cross |= {(i, k) for k in range(a, i - shift + 1)}
            own |= {(i, k) for k in range(max(a, i - window), i + 1)}
    return cross, own


def seen(segments_q, segments_k, window=None):
    """What causal, bottom-right aligned segments show: pairs of (query number, key number)."""
    pairs = set()
    for (qa, qb), (ka, kb) in zip(pairwise(segments_q), pairwise(segments_k), strict=True):
        for r in range(qb - qa):
            end = (kb - ka) - (qb - qa) + r
            low = 0 if window is None else max(0, end - window)
            pairs |= {(qa + r, ka + c) for c in range(low, end + 1)}
    return pairs


@pytest.mark.parametrize("case", range(25))
def test_every_chunk_sees_exactly_the_definition(case):
    rng = random.Random(case)
    lengths = [rng.randint(1, 14) for _ in range(rng.randint(1, 6))]
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    shifts = [rng.randint(1, 6) for _ in lengths]
    window, size = rng.randint(1, 9), rng.choice([1, 3, 5, 100])
    want_cross, want_own = definition(bounds, shifts, window)
    got_cross, got_own = set(), set()
    for start, stop in packed_sequences.cut(torch.arange(bounds[-1]), size):
        assert stop - start <= size
        chunk = indices.make_chunk(bounds, shifts, start, stop, window=window)
        assert start - window <= chunk.halo <= start
        assert chunk.own_k[-1] == stop - chunk.halo
        rows = [k for a, b in chunk.spans for k in range(a, b)]
        cross_k = [0, *accumulate(b - a for a, b in chunk.spans)]
        got_cross |= {(start + q, rows[k]) for q, k in seen(chunk.queries, cross_k)}
        got_own |= {(start + q, chunk.halo + k) for q, k in seen(chunk.queries, chunk.own_k, window)}
    assert got_cross == want_cross
    assert got_own == want_own


def test_cut_holds_wanted_rows_and_skips_the_rest():
    rows = torch.tensor([3, 4, 5, 6, 40, 41, 99])
    assert packed_sequences.cut(rows, 3) == [(3, 6), (6, 7), (40, 42), (99, 100)]
    assert packed_sequences.cut(rows, 0) == [(3, 100)]
    assert packed_sequences.cut(rows[:0], 3) == []


def test_anchor_offset_positions():
    pos = packed_sequences.positions((0, 6, 9, 11), offsets=[100, 7, 5], anchors=4)
    assert pos.tolist() == [0, 1, 2, 3, 104, 105, 0, 1, 2, 0, 1]  # a document of anchors alone does not move
    assert packed_sequences.positions((0, 3, 5)).tolist() == [0, 1, 2, 0, 1]


def test_offsets_are_uniform_on_what_is_usable_and_come_from_the_seed():
    drawn = torch.tensor(packed_sequences.draw_offsets([10] * 40_000, usable=13, seed=1))
    assert torch.bincount(drawn).tolist() == pytest.approx([10_000] * 4, rel=0.05)  # 0..3
    assert packed_sequences.draw_offsets([10, 20, 13], usable=13, seed=1)[1:] == [0, 0]
    assert packed_sequences.draw_offsets([10, 9], usable=100, max_doc_tokens=9, seed=1)[0] == 0
    state = torch.get_rng_state()
    again = packed_sequences.draw_offsets([50] * 5, usable=1000, seed=4)
    assert again == packed_sequences.draw_offsets([50] * 5, usable=1000, seed=4)
    assert again != packed_sequences.draw_offsets([50] * 5, usable=1000, seed=5)
    assert torch.equal(state, torch.get_rng_state())


def test_shifts_follow_their_weights_and_the_seed():
    drawn = torch.tensor(indices.draw_shifts(30_000, weights=[1, 0, 2], seed=9))
    assert torch.bincount(drawn, minlength=4).tolist() == pytest.approx([0, 10_000, 0, 20_000], rel=0.05)
    assert indices.draw_shifts(4, weights=[1.0], seed=0) == [1] * 4
    assert indices.draw_shifts(9, weights=[1] * 5, seed=2) == indices.draw_shifts(9, weights=[1] * 5, seed=2)
