"""Rows on the host and chosen rows in slots: what the slots hold, and attention over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.cache.base import Causal, PrefixOnly, Tree
from longtrain.cache.dense import DenseCache
from longtrain.cache.elastic import ElasticCache, Offloading
from longtrain.cache.entry_sets import ReadBudget, choose_entries
from longtrain.cache.selected import SelectedCache
from longtrain.errors import ConfigError, ConflictError, LongtrainError
from longtrain.kernels.slot_assignment import SlotMap

L, B, H, G, D = 3, 3, 4, 2, 8
BUDGET = ReadBudget(rows=12, sinks=2, window=3, every=4)
TABLE = torch.tensor([[0, 2], [1, 1], [2, 0]])
SHARED = torch.tensor([[0, 2], [0, 2], [2, 1]])
"""Two layers that read the same sets."""
ROW = 2 * D * 8
"""Bytes of a row of one head in fp64."""


@pytest.mark.parametrize("most_moved", [12, 3, -1])
def test_slots_hold_what_was_chosen(most_moved):
    """After any sequence of sets: every row once, and rows that stay are not moved."""
    slots = SlotMap(B, 2, 12, most_moved=most_moved, device=torch.device("cpu"))
    content = torch.full((B, 2, 12), -1)
    len_B, full = torch.tensor([5, 11, 30]), 0
    idx, n_B = torch.zeros(B, 2, 12, dtype=torch.int64), torch.zeros(B, dtype=torch.int64)
    budget = replace(BUDGET, every=1)
    for step in range(12):
        due_B = torch.rand(B) < 0.8 if step else torch.ones(B, dtype=torch.bool)
        found = choose_entries(torch.randn(B, 2, 60), len_B, budget)
        idx = torch.where(due_B[:, None, None], found, idx)
        n_B = torch.where(due_B, len_B.clamp(max=12), n_B)
        before = slots.row_BXK.clone()
        slots.change(idx, n_B, due_B)
        for b in range(B):
            for x in range(2):
                expected, n = set(idx[b, x, : n_B[b]].tolist()), int(slots.n_BX[b, x])
                held = set(before[b, x].tolist()) - {-1}
                new = len(expected - held)
                loads_all = bool(due_B[b]) and new > most_moved
                assert n == (len(expected) if loads_all else new)
                full += loads_all and bool(held)
                content[b, x, slots.to_BXK[b, x, :n]] = slots.from_BXK[b, x, :n]
                assert sorted(content[b, x, : n_B[b]].tolist()) == sorted(expected)
                assert torch.equal(content[b, x, : n_B[b]], slots.row_BXK[b, x, : n_B[b]])
                assert slots.row_BXK[b, x, n_B[b] :].eq(-1).all()
        len_B = len_B + torch.tensor([1, 2, 0])
    assert int(slots.full_loads) == full and (full > 0) == (most_moved < 12)


def caches(lengths, offloading, *, budget=BUDGET, room=24, table=TABLE):
    """An elastic cache and the plain one with the same prompts, both ready to decode."""
    shape = {"n_layers": L, "n_kv_heads": G, "head_dim": D, "batch": B, "device": "cpu"}
    shape |= {"max_tokens": max(lengths) + room, "max_nodes": 6, "dtype": torch.float64}
    both = ElasticCache(**shape, offloading=offloading), SelectedCache(DenseCache(**shape))
    rows = torch.randn(L, 2, B, G, max(lengths), D, dtype=torch.float64)
    q = torch.randn(B, H, max(lengths), D, dtype=torch.float64)
    for cache in both:
        cache.reserve(budget)
        for layer in range(L):
            cache.write(layer, *rows[layer])
            cache.attend(layer, q, mask=Causal(), scale=0.3)
        cache.commit(None, torch.tensor(lengths))
        cache.begin(budget, table_LG=table)
    return both


def gib(rows, pages):
    """A cap for the slots of `BUDGET` with 6 nodes and so many pages of 8 rows of a layer."""
    return (L * B * G * rows * ROW + pages * B * G * 8 * ROW) / 2**30


SLOTS = 12 + 3 + 6


@pytest.mark.corners
@pytest.mark.parametrize(
    "offloading",
    [
        Offloading(),
        Offloading(difference=False),
        Offloading(reload_above=0.3, prefetch=False),
        Offloading(memory_gib=gib(SLOTS, 18), page_entries=8),
        Offloading(memory_gib=gib(SLOTS, 1000), page_entries=8),
    ],
    ids=["host", "all", "cap", "some", "device"],
)
@pytest.mark.parametrize("table", [None, TABLE, SHARED], ids=["apart", "side by side", "shared"])
@pytest.mark.parametrize("dense", [(), (1,)], ids=["", "dense"])
def test_attention_is_that_over_the_same_rows_on_the_device(offloading, dense, table):
    """Chains, trees whose paths are cut and moved, reads of the prefix, blocks that read everything."""
    budget = replace(BUDGET, dense_layers=dense)
    if table is not None:
        offloading = replace(offloading, side_by_side=3)
    table = TABLE if table is None else table
    elastic, plain = caches([40, 31, 9], offloading, budget=budget, table=table)
    away = [len(elastic.offloaded)]
    for T, taken, tree in ((3, [2, 3, 0], False), (4, [2, 1, 3], True), (1, [1, 1, 1], False)) * 3:
        scores = torch.randn(B, 3, elastic.used)
        mask = Causal()
        path = None
        if tree:
            mask_BTT = torch.ones(T, T).tril().bool().expand(B, T, T).clone()
            mask_BTT[:, -1, 1:-1] = False
            mask, path = Tree(mask_BTT), torch.tensor([[0, 3, 0], [0, 1, 2], [0, 2, 3]])
        steps = []
        q, new = torch.randn(L, B, H, T, D).double(), torch.randn(L, 2, B, G, T, D).double()
        for cache in (elastic, plain):
            out = []
            cache.choose(scores)
            for layer in range(L):
                cache.write(layer, *new[layer])
                out.append(cache.attend(layer, q[layer], mask=mask, scale=0.4)[0])
            out.append(cache.attend(0, q[0], mask=PrefixOnly(), scale=0.4)[0])
            with cache.dense():
                cache.write(1, *new[1])
                out.append(cache.attend(1, q[1], mask=mask, scale=0.4)[0])
            cache.commit(path, torch.tensor(taken).minimum(cache.commit_limit()))
            steps.append(out)
        for found, wanted in zip(*steps, strict=True):
            torch.testing.assert_close(found, wanted)
        assert torch.equal(elastic.len_B, plain.len_B)
        away.append(len(elastic.offloaded))
    assert away == sorted(away)
    if offloading.memory_gib is None:
        assert away[-1] == L - len(dense)
    elif offloading.memory_gib == gib(SLOTS, 1000):
        assert away[-1] == 0 and elastic.moved_bytes == 0 and elastic.tensors() is not None
    else:  # 18 pages: three layers of up to 48 rows, then two
        assert (away[0], away[-1]) == (0, 1) and elastic.moved_bytes > 0


@pytest.mark.parametrize("table", [TABLE, SHARED], ids=["", "shared"])
def test_what_is_moved_is_counted(table):
    """The first sets in full, then what is new, of the layers that are on the host."""
    offloading = Offloading(side_by_side=3)
    elastic, _ = caches([40, 31, 9], offloading, budget=replace(BUDGET, every=1), table=table)
    scores = torch.randn(B, 3, elastic.used)
    elastic.choose(scores)
    heads = torch.bincount(table.flatten())
    first = int((elastic.entry_sets.n_B[:, None] * heads).sum())
    assert int(elastic.moved_rows) == first and elastic.moved_bytes == first * ROW
    elastic.choose(scores)  # not due again before a row is committed
    assert int(elastic.moved_rows) == first
    before = elastic.entry_sets.idx_BXK.clone()
    for layer in range(L):
        elastic.write(layer, *torch.randn(2, B, G, 1, D).double())
    elastic.commit(None, torch.ones(B, dtype=torch.int64))
    elastic.choose(torch.randn(B, 3, elastic.used))
    new = sum(
        len({*after.tolist()[: min(n + 1, 12)]} - {*old.tolist()[:n]}) * int(heads[x])
        for b, n in enumerate([12, 12, 9])
        for x, (after, old) in enumerate(zip(elastic.entry_sets.idx_BXK[b], before[b], strict=True))
    )
    assert int(elastic.moved_rows) == first + new and new > 0


@pytest.mark.parametrize(
    ("table", "dense", "runs"),
    [
        (SHARED, (), [(0, 2), (2, 3)]),
        (SHARED, (1,), [(0, 1), (2, 3)]),
        (TABLE, (), [(0, 1), (1, 2), (2, 3)]),
        (TABLE[:1].expand(3, -1), (), [(0, 3)]),
    ],
)
def test_neighbours_with_the_same_sets_come_together(table, dense, runs):
    """A token's rows of the three layers lie one behind the other, and a run is on the host or is not."""
    cap = Offloading(memory_gib=gib(SLOTS, 14), page_entries=8, side_by_side=3)
    cache, _ = caches([40, 31, 9], cap, budget=replace(BUDGET, dense_layers=dense), table=table)
    assert [(run.start, run.stop) for run in cache._rows.runs] == runs
    host_BGSPE = cache._rows.host_NBGSPE[0]
    assert host_BGSPE.is_contiguous() and host_BGSPE.shape[3] == L
    for layer in range(L):
        torch.testing.assert_close(host_BGSPE[0, :, :40, layer, :D], cache.keys(layer)[0, :, :40])
    assert 0 < len(cache.offloaded) < L
    marked = cache._rows.on_host_L.tolist()
    for run in cache._rows.runs:
        away = int(any(layer in cache.offloaded for layer in range(run.start, run.stop)))
        assert marked[run] == [away] * len(marked[run])


def test_layers_that_cannot_be_divided_lie_alone():
    cache, _ = caches([9, 9, 9], Offloading(side_by_side=2))
    assert cache._rows.host_NBGSPE.shape[::4] == (L, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Offloading(memory_gib=0.0), "memory_gib=0.0; allowed: GiB above 0"),
        (lambda: Offloading(memory_gib=float("inf")), "memory_gib=inf; allowed: GiB above 0"),
        (lambda: Offloading(memory_gib=float("nan")), "memory_gib=nan; allowed: GiB above 0"),
        (
            lambda: caches([9, 9, 9], Offloading(memory_gib=1e-5)),
            "memory_gib=1e-05 and the entries that each step",
        ),
        (
            lambda: unreserved().write(0, *torch.randn(2, B, G, 4, D)),
            "for a selector, and there is none; add one",
        ),
        (lambda: by_layer(), "selected within each layer; leave the cache out"),
        (lambda: too_many(), "cache is full: 37 tokens committed and 6 new tokens, room for 39"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises((ConfigError, ConflictError)) as caught:
        make()
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, LongtrainError)


def unreserved():
    return ElasticCache(
        n_layers=L, n_kv_heads=G, head_dim=D, batch=B, max_tokens=9, max_nodes=1, device="cpu",
        dtype=torch.float64,
    )  # fmt: skip


def by_layer():
    cache = unreserved()
    cache.reserve(BUDGET)
    cache.begin(BUDGET, table_LG=None, ask=lambda *_: None)


def too_many():
    cache, _ = caches([9, 9, 9], Offloading(), room=24)
    while True:
        cache.choose(torch.randn(B, 3, cache.used))
        for layer in range(L):
            cache.write(layer, *torch.randn(2, B, G, 4, D).double())
        cache.commit(None, cache.commit_limit())


def test_the_cap_that_a_refusal_names_suffices():
    """Of any size: the number is rounded, and never down."""
    for rows in range(BUDGET.rows, BUDGET.rows + 8):
        budget = replace(BUDGET, rows=rows)
        with pytest.raises(ConfigError) as caught:
            caches([9, 9, 9], Offloading(memory_gib=1e-6), budget=budget)
        named = float(str(caught.value).split("allowed: ")[1].split()[0])
        caches([9, 9, 9], Offloading(memory_gib=named), budget=budget)


def test_a_layer_that_is_named_twice_takes_the_place_of_none():
    cache, budget = unreserved(), replace(BUDGET, dense_layers=(1, 1))
    cache.offloading = Offloading(memory_gib=1.0)
    cache.reserve(budget)
    assert cache.offloaded == []
