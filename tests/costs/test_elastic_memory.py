"""Thresholds of adaptive memory: the paper's equations, and what the cache really does."""

import pytest
import torch

from longtrain.cache.elastic import ElasticCache, Offloading
from longtrain.cache.row_sets import ReadBudget
from longtrain.costs.elastic import ElasticMemory
from longtrain.errors import ConfigError

GIB = 2**30
LLAMA8B = {"n_layers": 32, "n_kv_heads": 8, "head_dim": 128, "batch": 1, "itemsize": 2}


def test_the_example_of_an_8b_model_on_24_gb():
    """As Eq. 7 counts: with all layers on the host their slots take four bytes a number of K and V."""
    paper = ElasticMemory(**LLAMA8B, slots=2048, fixed_bytes=1.3 * 16.06e9, more_layers=5, every_slot=False)
    lengths = paper.thresholds(24e9)
    by_hand = (24e9 - 1.3 * 16.06e9 - 4 * 32 * 2048 * 1024) / (4 * 5 * 1024)
    assert lengths[32] == int(by_hand) and lengths[0] == int((24e9 - 1.3 * 16.06e9) / (4 * 37 * 1024))


@pytest.mark.parametrize("every_slot", [True, False])
@pytest.mark.parametrize("page_rows", [1, 128])
@pytest.mark.parametrize("more_layers", [0, 0.5, 5])
def test_thresholds_are_the_greatest_lengths_that_fit(every_slot, page_rows, more_layers):
    coins = torch.Generator().manual_seed(0)
    for _ in range(60):
        numbers = torch.randint(1, 40, (5,), generator=coins).tolist()
        L, heads, batch, slots, gib = numbers[0], numbers[1], numbers[2], 64 * numbers[3], numbers[4]
        memory = ElasticMemory(L, heads, 64, batch, 2, slots, 1e6 * heads, more_layers, every_slot, page_rows)
        cap = gib * GIB / 8
        if memory.bytes(0, L) > cap:
            with pytest.raises(ConfigError, match="a cap of"):
                memory.thresholds(cap)
            continue
        lengths = memory.thresholds(cap)
        assert len(lengths) == L + 1 and (lengths[-1] is None) == (more_layers == 0)
        for on_host, length in enumerate(lengths):
            if length is None or memory.bytes(0, on_host) > cap:
                continue
            assert memory.bytes(length, on_host) <= cap < memory.bytes(length + 1, on_host)
            assert memory.on_host(max(1, length), cap) <= on_host or length == 0
            if length + 1 <= max(one or 0 for one in lengths):
                assert memory.on_host(length + 1, cap) != on_host
        known = [one for one in lengths if one is not None]
        if every_slot or page_rows == 1:  # they grow where texts are longer than sets, else they shrink
            assert known == sorted(known, reverse=not every_slot and lengths[0] < slots)


@pytest.mark.parametrize("memory_gib", [4e-5, 6e-5, 7e-5])
def test_the_cache_lets_layers_go_where_the_thresholds_say(memory_gib):
    """Growing row by row, with pages of 8 rows and a step's tail counted."""
    L, B, G, D, budget = 4, 2, 2, 8, ReadBudget(rows=12, sinks=2, window=3)
    cache = ElasticCache(
        n_layers=L, n_kv_heads=G, head_dim=D, batch=B, max_tokens=120, max_nodes=2, device="cpu",
        dtype=torch.float32, offloading=Offloading(memory_gib=memory_gib, page_rows=8),
    )  # fmt: skip
    cache.reserve(budget)
    memory = ElasticMemory(L, G, D, B, 4, slots=12 + 2, page_rows=8)
    away = []
    for length in range(1, 122):
        cache.make_room(length)
        away.append(len(cache.offloaded))
        assert away[-1] == memory.on_host(length, memory_gib * GIB)
    assert away == sorted(away) and away[0] == 0 and away[-1] > 0


def test_a_cap_that_nothing_fits_into_is_refused():
    with pytest.raises(ConfigError, match=r"a cap of 0.1 GiB, and with all 32 layers .* 0.25 GiB stay"):
        ElasticMemory(**LLAMA8B, slots=2048).thresholds(0.1 * GIB)
