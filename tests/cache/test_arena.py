"""Arenas against the caches they take their rows from: the same attention, lengths on the device alone."""

from __future__ import annotations

import pytest
import torch

from longtrain.cache.arena import ArenaCache, RaggedArena, arena_for
from longtrain.cache.base import Causal, PrefixOnly, Tree
from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import compact
from longtrain.decoding.evict import Keep

L, B, H, G, D = 2, 3, 4, 2, 16
RNG = torch.Generator().manual_seed(0)


def rows(heads: int, count: int) -> torch.Tensor:
    return torch.randn((B, heads, count, D), generator=RNG, dtype=torch.float64)


def dense(tokens: int, nodes: int = 0) -> DenseCache:
    sizes = {"n_layers": L, "n_kv_heads": G, "head_dim": D, "batch": B}
    return DenseCache(**sizes, max_tokens=tokens, max_nodes=nodes, device="cpu", dtype=torch.float64)


def filled(cache: DenseCache, lengths: list[int]) -> DenseCache:
    for layer in range(L):
        cache.write(layer, rows(G, max(lengths)), rows(G, max(lengths)))
    cache.commit(None, torch.tensor(lengths))
    return cache


def step(caches, mask, T: int, path=None, n=None) -> None:
    """Rows written to and attended in both, then committed; attention must agree."""
    for layer in range(L):
        k, v, q = rows(G, T), rows(G, T), rows(H, T)
        outs = []
        for cache in caches:
            if not isinstance(mask, PrefixOnly):
                cache.write(layer, k, v)
            outs.append(cache.attend(layer, q, mask=mask, scale=0.3)[0])
        torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    if n is not None:
        for cache in caches:
            cache.commit(path, n)
        assert torch.equal(caches[0].len_B, caches[1].len_B)


def all_steps(other, arena: ArenaCache | RaggedArena) -> None:
    """A token, a chain half accepted, a tree whose paths move, a look at the prefix."""
    step((other, arena), Causal(), 1, n=torch.tensor([1, 1, 1]))
    step((other, arena), Causal(), 4, n=torch.tensor([4, 0, 2]))
    parents = torch.tensor([-1, 0, 0, 1, 2]).expand(B, 5)
    seen = torch.eye(5, dtype=torch.bool).repeat(B, 1, 1)
    for i in range(1, 5):
        seen[:, i] |= seen[torch.arange(B), parents[:, i]]
    path = torch.tensor([[0, 2, 4], [0, 1, 0], [0, 2, 4]])
    step((other, arena), Tree(seen), 5, path=path, n=torch.tensor([3, 2, 0]))
    step((other, arena), Tree(seen), 5, path=path, n=torch.tensor([2, 3, 3]))
    step((other, arena), PrefixOnly(), 2)
    step((other, arena), Causal(), 2, n=torch.tensor([1, 2, 1]))


def test_rows_of_another_cache_move_in():
    other = filled(dense(40), [9, 1, 14])
    arena = ArenaCache(dense(64))
    arena.take(other, room=20)
    all_steps(other, arena)


def test_its_own_store_is_taken_where_it_lies():
    rng = RNG.get_state()
    other = filled(dense(40), [9, 1, 14])
    RNG.set_state(rng)
    store = filled(dense(64), [9, 1, 14])
    arena = ArenaCache(store)
    where = arena.store.k_LBGSD.data_ptr()
    arena.take(store, room=20)
    assert arena.store.k_LBGSD.data_ptr() == where
    all_steps(other, arena)


LENGTHS = [9, 12, 14]
COUNTS = {
    "even": [[[5, 5]] * 3] * 2,
    "by sequence": [[[3, 3], [6, 6], [14, 14]]] * 2,
    "by layer": [[[7, 7]] * 3, [[2, 2]] * 3],
    "by head": [[[9, 1], [1, 12], [4, 5]], [[1, 2], [12, 6], [14, 1]]],
}
"""Entries kept of each layer, sequence and KV head."""


def evicted(counts, room: int):
    """A cache of prompts of `LENGTHS` tokens of which so many random entries are kept."""
    n_LBG = torch.tensor(counts)
    idx_LBGK = torch.zeros(*n_LBG.shape, int(n_LBG.max()), dtype=torch.int64)
    for at in torch.cartesian_prod(*map(torch.arange, n_LBG.shape)).tolist():
        some = torch.randperm(LENGTHS[at[1]], generator=RNG)[: n_LBG[tuple(at)]].sort().values
        idx_LBGK[tuple(at)][: len(some)] = some
    return compact(filled(dense(40), LENGTHS), Keep(idx_LBGK, n_LBG), LENGTHS, room=room)


@pytest.mark.parametrize("after", [False, True], ids=["prompt", "text after it"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_after_eviction_each_head_has_its_own_number_of_rows(counts, after):
    """Rows of a head never reach those of the next, which are read at every step."""
    other = evicted(counts, room=31)
    if after:
        step((other, other), Causal(), 3, n=None)
        other.commit(None, torch.tensor([3, 1, 2]))
    arena = arena_for(other, 28)
    assert isinstance(arena, RaggedArena)
    arena.take(other, room=28)
    assert arena.len_B.tolist() == other.len_B.tolist()
    all_steps(other, arena)
    step((other, arena), Causal(), 16, n=torch.tensor([0, 0, 0]))


def test_prompts_that_lost_nothing_move_in_too():
    other = filled(dense(40), LENGTHS)
    arena = arena_for(other, 26)
    assert isinstance(arena, RaggedArena)
    arena.take(other, room=26)
    all_steps(other, arena)


def test_one_buffer_serves_every_distribution_that_fits():
    arena = arena_for(evicted(COUNTS["by head"], room=20), 20)
    where = [one.data_ptr() for one in arena.tensors()]
    for counts in COUNTS.values():
        other = evicted(counts, room=20)
        assert arena.fits(other, 20)
        arena.take(other, room=20)
        all_steps(other, arena)
    assert [one.data_ptr() for one in arena.tensors()] == where
    assert arena.fits(filled(dense(40), LENGTHS), 7) and not arena.fits(filled(dense(40), LENGTHS), 90)
    sizes = {"n_layers": L, "n_kv_heads": G, "head_dim": D, "max_tokens": 20, "max_nodes": 0, "device": "cpu"}
    for changed in ({"batch": B + 1}, {"dtype": torch.float32}, {"head_dim": 8}, {"n_layers": 1}):
        assert not arena.fits(DenseCache(**{**sizes, "batch": B, "dtype": torch.float64, **changed}), 4)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_bytes_of_ragged_rows_are_those_kept_and_the_room(counts):
    """Nothing is padded: as many entries as the evicted cache itself has."""
    other = evicted(counts, room=20)
    arena = arena_for(other, 20)
    arena.take(other, room=20)
    rows = int(torch.tensor(counts).sum()) + L * B * G * 20
    assert arena.bytes() == rows * 2 * D * 8 + 3 * L * B * G * 8 + B * 8
    assert arena.room_left() == 20


def test_its_tensors_stay_where_they_are():
    arena = ArenaCache(dense(64))
    where = [one.data_ptr() for one in arena.tensors()]
    for lengths in ([9, 1, 14], [3, 3, 3]):
        arena.store.rewind([0] * B)
        arena.take(filled(arena.store, lengths), room=10)
        assert arena.len_B.tolist() == arena.rows_B.tolist() == lengths
        step((arena, arena), Causal(), 3, n=torch.tensor([0, 0, 0]))
        arena.commit(None, torch.tensor([3, 1, 0]))
        assert arena.len_B.tolist() == [n + more for n, more in zip(lengths, (3, 1, 0), strict=True)]
    assert [one.data_ptr() for one in arena.tensors()] == where


def test_bytes_are_those_claimed():
    arena = ArenaCache(dense(1000))
    arena.take(filled(dense(20), [7, 7, 7]), room=13)
    assert arena.bytes() == 20 * 2 * L * B * G * D * 8 + 2 * B * 8
