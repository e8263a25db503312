"""The arena against the caches it takes its rows from: the same attention, lengths on the device alone."""

from __future__ import annotations

import pytest
import torch

from longtrain.cache.arena import ArenaCache, movable
from longtrain.cache.base import Causal, PrefixOnly, Tree
from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import EvictedCache, compact
from longtrain.decoding.evict import Keep
from longtrain.errors import ConfigError, ConflictError

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


def all_steps(other, arena: ArenaCache) -> None:
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


def test_after_even_eviction_rows_are_fewer_than_positions():
    lengths = [9, 12, 14]
    idx = torch.stack([torch.randperm(9, generator=RNG)[:5].sort().values for _ in range(L * B * G)])
    keep = Keep(idx.view(L, B, G, 5), torch.full((L, B, G), 5))
    evicted = compact(filled(dense(40), lengths), keep, lengths, room=20)
    arena = ArenaCache(dense(30))
    arena.take(evicted, room=20)
    assert arena.rows_B.tolist() == [5, 5, 5] and arena.len_B.tolist() == lengths
    all_steps(evicted, arena)


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


def test_what_does_not_fit_is_refused():
    arena = ArenaCache(dense(20))
    with pytest.raises(ConfigError, match="21 positions for an arena of 20"):
        arena.take(filled(dense(30), [8, 8, 8]), room=13)
    n = torch.tensor([4, 5]).expand(L, B, G)
    ragged = compact(
        filled(dense(30), [8, 8, 8]), Keep(torch.arange(5).expand(L, B, G, 5), n), [8, 8, 8], room=4
    )
    assert isinstance(ragged, EvictedCache) and movable(ragged) is None
    with pytest.raises(ConflictError, match="EvictedCache whose heads have different numbers of entries"):
        arena.take(ragged, room=4)
