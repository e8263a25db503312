"""Chosen rows: the sets themselves, and attention over them against a mask over everything."""

from __future__ import annotations

import pytest
import torch

from longtrain.cache.base import Causal, PrefixOnly, Tree
from longtrain.cache.dense import DenseCache
from longtrain.cache.entry_sets import EntrySets, ReadBudget, choose_entries
from longtrain.cache.selected import SelectedCache
from longtrain.errors import ConfigError, LongtrainError
from longtrain.kernels.tree_attention.reference import masked_attention

L, B, H, G, D = 2, 3, 4, 2, 8


def naive(scores_S, length, budget):
    """The set of one sequence, sorted by hand."""
    forced = [s for s in range(length) if s < budget.sinks or s >= length - budget.window]
    others = sorted(set(range(length)) - {*forced}, key=lambda s: (-float(scores_S[s]), -s))
    return sorted((forced + others)[: budget.rows])


def test_a_set_is_the_best_rows_and_those_that_are_read_in_any_case():
    """With ties, infinities, padding that says anything, and texts on both sides of the budget."""
    budget = ReadBudget(rows=12, sinks=2, window=3)
    scores = torch.randint(-3, 4, (4, 3, 40)).float()
    scores[0, 0, 5:9], scores[1, 1, 3] = -torch.inf, torch.inf
    len_B = torch.tensor([40, 23, 9, 12])
    for b, length in enumerate(len_B.tolist()):
        scores[b, :, length:] = torch.nan
    idx_BXK = choose_entries(scores, len_B, budget)
    wider = choose_entries(torch.nn.functional.pad(scores, (0, 9), value=7.0), len_B, budget)
    assert torch.equal(idx_BXK, wider)
    for b, length in enumerate(len_B.tolist()):
        for x in range(3):
            found = idx_BXK[b, x].tolist()
            assert found[: min(12, length)] == naive(scores[b, x], length, budget)
            assert not any(found[length:])


def test_a_set_is_chosen_when_it_is_due_and_no_step_goes_beyond_it():
    sets = EntrySets(ReadBudget(rows=6, sinks=1, window=1, every=4), 2, 1, torch.device("cpu"))
    len_B = torch.tensor([10, 20])
    scores = torch.arange(30.0).expand(2, 1, 30)
    sets.open(len_B)
    sets.put(scores)
    first = sets.idx_BXK.clone()
    assert first[0, 0].tolist() == [0, 5, 6, 7, 8, 9] and sets.limit(len_B).tolist() == [4, 4]
    len_B = len_B + torch.tensor([3, 4])
    sets.open(len_B)
    sets.put(-scores)
    assert torch.equal(sets.idx_BXK[0], first[0]) and sets.limit(len_B).tolist() == [1, 4]
    assert sets.idx_BXK[1, 0].tolist() == [0, 1, 2, 3, 4, 23] and sets.since_B.tolist() == [10, 24]
    rows = sets.rows(torch.tensor([0, 0]), 64, 2)[:, 0]
    assert rows[0, : 6 + 3 + 2].tolist() == [0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert rows[1, : 6 + 0 + 2].tolist() == [0, 1, 2, 3, 4, 23, 24, 25]


def filled(lengths, *, room=20):
    """A plain cache with random rows."""
    store = DenseCache(
        n_layers=L, n_kv_heads=G, head_dim=D, batch=B, max_tokens=max(lengths) + room, max_nodes=8,
        device="cpu", dtype=torch.float64,
    )  # fmt: skip
    for layer in range(L):
        store.write(layer, *torch.randn(2, B, G, max(lengths), D, dtype=torch.float64))
    store.commit(None, torch.tensor(lengths))
    return store


def visible(sets, cache, layer, mask_BTT):
    """Rows that each new row sees, by hand: [B, G, T, S]."""
    T, S = mask_BTT.shape[1], cache.store.capacity
    seen = torch.zeros(B, G, T, S, dtype=torch.bool)
    for b in range(B):
        n, since = int(cache.len_B[b]), int(sets.since_B[b])
        for g in range(G):
            own = sets.idx_BXK[b, cache._table_LG[layer, g], : int(sets.n_B[b])]
            seen[b, g, :, own] = True
        seen[b, :, :, since:n] = True
        seen[b, :, :, n : n + T] = mask_BTT[b]
    return seen


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_step_attends_to_its_sets_and_nothing_else(tree):
    """Texts of other lengths with other sets, KV heads that share one, rows committed since the choice."""
    cache = SelectedCache(filled([40, 31, 9]))
    table = torch.tensor([[0, 2], [1, 1]])
    cache.begin(ReadBudget(rows=12, sinks=2, window=3, every=6), table_LG=table)
    sets = cache.entry_sets
    for T, taken in ((3, [2, 3, 0]), (2, [2, 1, 2]), (4, [1, 2, 3])):
        cache.choose(torch.randn(B, 3, cache.used))
        mask_BTT = torch.ones(T, T).tril().bool().expand(B, T, T).clone()
        if tree:
            mask_BTT[:, -1, 1:-1] = False
        for layer in range(L):
            q, (k, v) = torch.randn(B, H, T, D).double(), torch.randn(2, B, G, T, D).double()
            cache.write(layer, k, v)
            out, lse = cache.attend(layer, q, mask=Tree(mask_BTT) if tree else Causal(), scale=0.4)
            seen = visible(sets, cache, layer, mask_BTT)
            for g in range(G):
                heads, one = slice(g * H // G, (g + 1) * H // G), slice(g, g + 1)
                k_all, v_all = cache.store.k_LBGSD[layer, :, one], cache.store.v_LBGSD[layer, :, one]
                expected, expected_lse = masked_attention(q[:, heads], k_all, v_all, seen[:, g], scale=0.4)
                torch.testing.assert_close(out[:, heads], expected)
                torch.testing.assert_close(lse[:, heads], expected_lse)
        cache.commit(None, torch.tensor(taken).minimum(cache.commit_limit()))


def test_what_reads_everything():
    """Dense layers, drafts that look at the prefix, the block that asks for it, and short texts."""
    store = filled([20, 15, 9])
    q = torch.randn(B, H, 1, D).double()
    new = torch.randn(2, B, G, 1, D).double()

    def attended(cache, layer, mask=None):
        cache.write(layer, *new)
        return cache.attend(layer, q, mask=mask or Causal(), scale=0.3)[0]

    dense = [attended(store, layer) for layer in range(L)]
    prefix = attended(store, 0, PrefixOnly())
    cache = SelectedCache(store)
    cache.begin(ReadBudget(rows=6, sinks=1, window=1, dense_layers=(1,)), table_LG=torch.zeros(L, G).long())
    cache.choose(torch.randn(B, 1, cache.used))
    assert not torch.allclose(attended(cache, 0), dense[0])
    assert torch.equal(attended(cache, 1), dense[1])
    assert torch.equal(attended(cache, 0, PrefixOnly()), prefix)
    with cache.dense():
        assert torch.equal(attended(cache, 0), dense[0])
    cache.begin(ReadBudget(rows=20, sinks=1, window=1), table_LG=torch.zeros(L, G).long())
    cache.choose(torch.randn(B, 1, cache.used))
    assert torch.equal(attended(cache, 0), dense[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ReadBudget(rows=68), "a budget of 68 entries, of which 4 sinks and the last 64"),
        (lambda: ReadBudget(rows=68), "select.window=8; {artifact"),
        (lambda: ReadBudget(rows=100, every=0), "select.every=0"),
        (lambda: ReadBudget(rows=100, dense_layers=(-1,)), "select.dense_layers"),
        (lambda: begin(torch.zeros(L, G + 1)), "a table of sets [2, 3]"),
        (lambda: begin(torch.full((L, G), -1)), "numbers from -1"),
        (lambda: begin(torch.zeros(L, G), dense_layers=(L,)), "select.dense_layers=[2]; allowed: 0..1"),
        (lambda: begin(torch.zeros(L, G)).choose(torch.zeros(B, 1, 8)), "scores of 8 entries"),
        (lambda: begin(torch.zeros(L, G)).choose(torch.zeros(B, 2, 9)), "[sequences, sets] = [3, 2]"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, LongtrainError)


def begin(table, **more):
    cache = SelectedCache(filled([9, 9, 9]))
    cache.begin(ReadBudget(rows=6, sinks=1, window=1, **more), table_LG=table.long())
    return cache
