"""Recall and Kendall's tau-b against a count over all pairs, written without tensors."""

import math

import pytest
import torch
from scipy import stats

from longtrain.decoding.ranking import kendall_tau, recall_at
from longtrain.errors import ConfigError


def tau_b(a: list[float], b: list[float]) -> float:
    """Pair by pair."""
    gap = free_a = free_b = 0
    for i in range(len(a)):
        for j in range(i):
            da, db = (a[i] > a[j]) - (a[i] < a[j]), (b[i] > b[j]) - (b[i] < b[j])
            gap, free_a, free_b = gap + da * db, free_a + abs(da), free_b + abs(db)
    return gap / math.sqrt(free_a * free_b) if free_a * free_b else math.nan


@pytest.mark.parametrize("size", [2, 3, 8, 31, 64, 65])
@pytest.mark.parametrize("levels", [3, 1000])
def test_tau_counts_every_pair(size: int, levels: int) -> None:
    a, b = (torch.randint(levels, (6, size)).double() for _ in range(2))
    b[0] = a[0]
    b[1] = -a[1]
    outputs = torch.tensor([tau_b(x.tolist(), y.tolist()) for x, y in zip(a, b, strict=True)])
    assert torch.allclose(kendall_tau(a, b), outputs.double(), atol=1e-12, equal_nan=True)
    assert torch.allclose(kendall_tau(b, a), outputs.double(), atol=1e-12, equal_nan=True)


def test_tau_is_scipys() -> None:
    a, b = torch.randint(40, (4, 500)).double(), torch.randn(4, 500, dtype=torch.float64)
    b = b + 0.1 * a
    outputs = [stats.kendalltau(x.numpy(), y.numpy()).statistic for x, y in zip(a, b, strict=True)]
    assert torch.allclose(kendall_tau(a, b), torch.tensor(outputs), atol=1e-12)


def test_recall_ignores_positions_that_do_not_count() -> None:
    a, b = torch.randn(3, 50), torch.randn(3, 50)
    valid = torch.rand(3, 50) < 0.6
    for row in range(3):
        only = valid[row]
        one, other = a[row, only][None], b[row, only][None]
        assert recall_at(a, b, 7, valid)[row] == recall_at(one, other, 7)[0]


def test_tau_where_one_side_says_nothing() -> None:
    flat = torch.zeros(1, 9)
    assert kendall_tau(flat, torch.randn(1, 9)).isnan().all() and kendall_tau(flat, flat).isnan().all()
    assert kendall_tau(torch.ones(1, 1), torch.ones(1, 1)).isnan().all()


def test_recall_by_hand() -> None:
    true = torch.tensor([[9.0, 8, 7, 1, 0, 0]])
    pred = torch.tensor([[5.0, 0, 4, 3, 0, 0]])
    assert recall_at(pred, true, 1).tolist() == [1.0]
    assert recall_at(pred, true, 2).tolist() == [0.5]  # {0, 2} of {0, 1}
    assert recall_at(pred, true, 3).tolist() == pytest.approx([2 / 3])
    assert recall_at(pred, true, 4).tolist() == [1.0]  # of the tied zeros the lowest position, 1, is in
    assert recall_at(pred, true, 99).tolist() == [1.0]  # k above S stands for all of S


def test_recall_over_what_is_valid() -> None:
    scores = torch.tensor([[3.0, 2, 1], [1, 2, 3]])
    valid = torch.tensor([[True, False, True], [False, False, False]])
    got = recall_at(scores, -scores, 1, valid)
    assert got[0] == 0.0 and got[1].isnan()
    assert recall_at(scores, -scores, 2, valid)[0] == 1.0


def test_wrong_shapes_and_k() -> None:
    with pytest.raises(ConfigError, match="k=0"):
        recall_at(torch.ones(1, 3), torch.ones(1, 3), 0)
    with pytest.raises(ConfigError, match=r"\(1, 3\), \(1, 4\)"):
        kendall_tau(torch.ones(1, 3), torch.ones(1, 4))
    with pytest.raises(ConfigError, match="allowed"):
        recall_at(torch.ones(3), torch.ones(3), 1)
