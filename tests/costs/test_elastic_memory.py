"""Thresholds of adaptive memory: the paper's equations, and what the cache really does."""

import pytest
import torch

from longtrain.cache.elastic import ElasticCache, Offloading
from longtrain.cache.entry_sets import ReadBudget
from longtrain.costs.elastic import ElasticMemory
from longtrain.errors import ConfigError

GIB = 2**30
LLAMA8B = {"n_layers": 32, "n_kv_heads": 8, "head_dim": 128, "batch": 1, "itemsize": 2}


def test_the_example_of_an_8b_model_by_hand():
    """As Eq. 7 counts: the slots of all layers take two bytes a number of K and V, tokens have the rest."""
    memory = ElasticMemory(**LLAMA8B, slots=2048)
    lengths = memory.thresholds(4e9)
    left = 4e9 - 4 * 32 * 2048 * 1024
    assert lengths[0] == int(left / (4 * 32 * 1024)) and lengths[31] == int(left / (4 * 1024))
    assert lengths[32] is None


@pytest.mark.parametrize("page_entries", [1, 128])
def test_thresholds_are_the_greatest_lengths_that_fit(page_entries):
    rng = torch.Generator().manual_seed(0)
    for _ in range(60):
        numbers = torch.randint(1, 40, (5,), generator=rng).tolist()
        L, heads, batch, slots, gib = numbers[0], numbers[1], numbers[2], 64 * numbers[3], numbers[4]
        memory = ElasticMemory(L, heads, 64, batch, 2, slots, page_entries)
        cap = gib * GIB / 8
        if memory.bytes(0, L) > cap:
            with pytest.raises(ConfigError, match="a cap of"):
                memory.thresholds(cap)
            continue
        *lengths, last = memory.thresholds(cap)
        assert len(lengths) == L and last is None and lengths == sorted(lengths)
        for on_host, length in enumerate(lengths):
            assert memory.bytes(length, on_host) <= cap < memory.bytes(length + 1, on_host)
            assert memory.on_host(max(1, length), cap) <= on_host or length == 0
            assert memory.on_host(length + 1, cap) > on_host


@pytest.mark.parametrize("memory_gib", [4e-5, 6e-5, 7e-5])
def test_the_cache_lets_layers_go_where_the_thresholds_say(memory_gib):
    """Growing row by row, with pages of 8 rows and a step's tail counted."""
    L, B, G, D, budget = 4, 2, 2, 8, ReadBudget(rows=12, sinks=2, window=3)
    cache = ElasticCache(
        n_layers=L, n_kv_heads=G, head_dim=D, batch=B, max_tokens=120, max_nodes=2, device="cpu",
        dtype=torch.float32, offloading=Offloading(memory_gib=memory_gib, page_entries=8),
    )  # fmt: skip
    cache.reserve(budget)
    memory = ElasticMemory(L, G, D, B, 4, slots=12 + 2, page_entries=8)
    away = []
    for length in range(1, 122):
        cache.make_room(length)
        away.append(len(cache.offloaded))
        assert away[-1] == memory.on_host(length, memory_gib * GIB)
    assert away == sorted(away) and away[0] == 0 and away[-1] > 0


def test_a_cap_that_nothing_fits_into_is_refused():
    with pytest.raises(ConfigError, match=r"a cap of 0.1 GiB, and with all 32 layers .* 0.25 GiB stay"):
        ElasticMemory(**LLAMA8B, slots=2048).thresholds(0.1 * GIB)
