"""What stays: against sorting in plain Python, with ties, padding and protected rows."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from longtrain.decoding.evict import Budget, Keep
from longtrain.decoding.select import max_pool, reduce_heads, top, top_adaptive
from longtrain.errors import ConfigError

LENGTHS = (11, 4, 7)


def scores(*, L=2, G=3, S=11, values=4, seed=0):
    """Few different values, so that there are many ties."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(values, (L, len(LENGTHS), G, S), generator=rng).float()


def kept(keep):
    """{(layer, sequence, head): positions}"""
    L, B, G = keep.n_LBG.shape
    assert not keep.n_LBG.is_cuda and keep.n_LBG.dtype == torch.int64
    found = {}
    for at in product(range(L), range(B), range(G)):
        n = int(keep.n_LBG[at])
        found[at] = keep.idx_LBGK[at][:n].tolist()
        assert not keep.idx_LBGK[at][n:].any()
    return found


def best(row, length, n, first=0, last=0):
    """The best n of a row's first `length`, sorted: protected ones, then by score, then from the left."""
    order = sorted(range(length), key=lambda i: (not (i < first or i >= length - last), -row[i], i))
    return sorted(order[:n])


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 3), (2, 0), (1, 2)])
@pytest.mark.parametrize("budget", [Budget(3), Budget(6), Budget(ratio=0.8), Budget(ratio=1.0), Budget(50)])
def test_top_is_a_stable_sort(budget, first, last):
    s = scores()
    for (layer, b, g), found in kept(top(s, LENGTHS, budget, protect_first=first, protect_last=last)).items():
        n = min(budget.of(LENGTHS[b]), LENGTHS[b])
        assert found == best(s[layer, b, g].tolist(), LENGTHS[b], n, first, last)


def test_budgets_of_each_layer():
    s, budgets = scores(values=1000), [[5, 2, 9], [3, 4, 1]]
    for (layer, b, g), found in kept(top(s, LENGTHS, budgets)).items():
        n = min(budgets[layer][b], LENGTHS[b])
        assert found == best(s[layer, b, g].tolist(), LENGTHS[b], n)


def test_all_equal_scores_keep_the_first():
    assert kept(top(torch.zeros(1, 1, 1, 9), (9,), Budget(4)))[0, 0, 0] == [0, 1, 2, 3]


def test_a_budget_below_what_is_protected_is_refused():
    with pytest.raises(ConfigError, match=r"budget of 3 entries is below the 4 .* set evict.budget_tokens=4"):
        top(scores(), LENGTHS, Budget(3), protect_last=4)
    with pytest.raises(ConfigError, match="budget of 3 entries is below the 5"):
        top_adaptive(scores(), LENGTHS, Budget(3), protect_last=4, protect_first=1)
    whole = kept(top(scores()[:, 1:2, :, :4], (4,), Budget(4), protect_last=32))  # it fits: nothing to refuse
    assert all(rows == [0, 1, 2, 3] for rows in whole.values())


def test_pooling_stays_within_its_sequence():
    s = torch.zeros(1, 2, 1, 9)
    s[0, 0, 0, 4], s[0, 1, 0, 6] = 1.0, 5.0  # the second lies beyond its sequence's end
    pooled = max_pool(s, (9, 5), kernel=5)[0, :, 0]
    assert pooled[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert pooled[1, :5].tolist() == [0] * 5
    assert torch.equal(max_pool(s[:, :1], (9,), kernel=1), s[:, :1])


def test_heads_are_reduced_group_by_group():
    s = torch.tensor([[[1.0, 0], [3, 4], [5, 6], [7, 0]]])
    assert reduce_heads(s, 2).tolist() == [[[2, 2], [6, 3]]]
    assert reduce_heads(s, 2, "max").tolist() == [[[3, 4], [7, 6]]]


@pytest.mark.parametrize("across", ["heads", "layers"])
@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("budget", [Budget(5), Budget(ratio=0.6)])
def test_adaptive_budgets_follow_the_rule(across, floor, budget):
    s, last = scores(values=1000, seed=3), 2
    keep = top_adaptive(s, LENGTHS, budget, protect_last=last, floor=floor, across=across, exact=False)
    L, G = s.shape[0], s.shape[2]
    found = kept(keep)
    for b, length in enumerate(LENGTHS):
        spare = budget.of(length) - last
        if budget.of(length) >= length:
            assert all(found[layer, b, g] == list(range(length)) for layer, g in product(range(L), range(G)))
            continue
        for layers in [range(L)] if across == "layers" else [[layer] for layer in range(L)]:
            places = list(product(layers, range(G), range(length - last)))
            flat = [(-float(s[layer, b, g, i]), at) for at, (layer, g, i) in enumerate(places)]
            won = [places[at] for _, at in sorted(flat)[: spare * len(layers) * G]]
            for layer, g in product(layers, range(G)):
                c = sum((layer, g) == place[:2] for place in won)
                n = min(max(1, round(c * (1 - floor) + int(spare * floor)) + last), length)
                assert found[layer, b, g] == best(s[layer, b, g].tolist(), length, n, 0, last)


def test_adaptive_budgets_move_rows_to_the_heads_that_want_them():
    s = torch.rand(1, 1, 2, 50)
    s[0, 0, 1] *= 0.01
    n = top_adaptive(s, (50,), Budget(10), floor=0.2).n_LBG[0, 0]
    assert n.tolist() == [18, 2]
    assert top_adaptive(s, (50,), Budget(10), floor=1.0).n_LBG[0, 0].tolist() == [10, 10]


@pytest.mark.corners
@pytest.mark.parametrize("across", ["heads", "layers"])
@pytest.mark.parametrize("protected", [0, 2])
@pytest.mark.parametrize("floor", [0.0, 0.2, 0.37, 1.0])
@pytest.mark.parametrize("tokens", [3, 4, 10])
def test_exact_adaptive_budgets_sum_to_the_total(tokens, floor, protected, across):
    L, G, lengths = 3, 5, (11, 40, 4)
    for seed in range(5):
        s = torch.rand(L, 3, G, 40, generator=torch.Generator().manual_seed(seed)) ** 4
        s[1, :, 2] *= 1e-3
        asked = {"protect_last": protected, "floor": floor, "across": across}
        keep = top_adaptive(s, lengths, Budget(tokens), **asked)
        loose = top_adaptive(s, lengths, Budget(tokens), **asked, exact=False)
        for b, length in enumerate(lengths):
            n_LG = keep.n_LBG[:, b]
            rows = min(tokens, length)
            assert n_LG.sum() == L * G * rows
            if across == "heads":
                assert (n_LG.sum(-1) == G * rows).all()
            assert n_LG.min() >= max(1, protected) and n_LG.max() <= length
            if protected and tokens < length:  # without protected rows every head gets one first
                assert (n_LG - loose.n_LBG[:, b]).abs().max() <= 2
        for (layer, b, g), found in kept(keep).items():
            n = int(keep.n_LBG[layer, b, g])
            assert found == best(s[layer, b, g].tolist(), lengths[b], n, 0, protected)


def test_the_published_rounding_loses_rows_that_exact_budgets_keep():
    s = torch.rand(1, 1, 5, 50, generator=torch.Generator().manual_seed(2))
    asked = {"floor": 0.2}
    loose = top_adaptive(s, (50,), Budget(9), **asked, exact=False).n_LBG.sum()
    assert 45 - 1.5 * 5 <= loose < 45
    assert top_adaptive(s, (50,), Budget(9), **asked).n_LBG.sum() == 45


@pytest.mark.parametrize("kernel", [1, 3])
def test_scores_that_are_no_numbers_come_last(kernel):
    s = scores(values=1000) + 1
    bad = s.clone()
    bad[0, 0, 0, 2:5] = torch.nan
    bad[1, 2, 1] = torch.nan  # a whole head
    less = bad.nan_to_num(nan=-1.0)
    for choose in (top, top_adaptive):
        pool = [max_pool(x, LENGTHS, kernel=kernel) for x in (bad, less)]
        assert kept(choose(pool[0], LENGTHS, Budget(6))) == kept(choose(pool[1], LENGTHS, Budget(6)))
    assert not {2, 3, 4} & set(kept(top(bad, LENGTHS, Budget(6)))[0, 0, 0])
    n = top_adaptive(bad, LENGTHS, Budget(6)).n_LBG
    assert (n.sum(-1) == torch.tensor([18, 12, 18])).all()


def test_a_share_is_rounded_down_as_it_is_written():
    for percent in range(1, 101):
        for length in (100, 1000, 12800, 100_000):
            assert Budget(ratio=percent / 100).of(length) == percent * length // 100
            assert Budget(ratio=1 - (100 - percent) / 100).of(length) == percent * length // 100
    assert Budget(ratio=0.29).of(100) == 29 and Budget(ratio=0.2999).of(100) == 29
    assert Budget(ratio=0.001).of(5) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give one"),
        ({"tokens": 5, "ratio": 0.5}, "give one"),
        ({"tokens": 0}, "budget_tokens=0; allowed: 1 or more"),
        ({"ratio": 0.0}, "budget_ratio=0.0; allowed: above 0"),
        ({"ratio": 1.5}, "budget_ratio=1.5"),
    ],
)
def test_budgets_that_are_none(given, words):
    with pytest.raises(ConfigError, match=words):
        Budget(**given)


@pytest.mark.gpu
def test_a_gpu_chooses_the_same():
    s = torch.randint(50, (4, 1, 8, 5000)).float()
    here, there = (top(x, (5000,), Budget(128), protect_last=32) for x in (s, s.cuda()))
    assert torch.equal(here.idx_LBGK, there.idx_LBGK.cpu())


def test_a_keep_as_a_mask():
    keep = Keep(torch.tensor([[[[1, 3], [2, 0]]]]), torch.tensor([[[2, 1]]]))
    assert keep.mask(4).tolist() == [[[False, True, False, True], [False, False, True, False]]]
