"""Processors and coins."""

from __future__ import annotations

import bisect
import itertools

import pytest
import torch
from scipy import stats

from longtrain.decoding.sampling import HashRng, Sampling, probs
from longtrain.errors import ConfigError

from .test_verify import reference_law


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=1),
        Sampling(temperature=1.0, top_k=500),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=0.9, top_p=0.9),
        Sampling(temperature=2.0, top_k=7, top_p=0.6),
    ],
    ids=str,
)
def test_processors_agree_with_a_plain_list_version(sampling):
    logits = 3 * torch.randn(2, 3, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 4:9] = logits[0, 0].max() + 1  # ties at the top, and at every cut
    logits[1] = logits[1].round()
    expected = reference_law(logits, sampling)
    assert torch.allclose(probs(logits, sampling), expected, atol=1e-12, rtol=0)
    single = probs(logits.float(), sampling)
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), expected, atol=1e-6)
    assert probs(logits.bfloat16(), sampling).dtype == torch.float32


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="allowed"):
        Sampling(**wrong)


def test_coins_know_nothing_of_the_batch():
    ids, pos = torch.tensor([5, 9, 2, 5]), torch.tensor([3, 3, 8, 4])
    weight = torch.rand(4, 11, generator=torch.Generator().manual_seed(0))
    whole = HashRng(7, ids)
    for row in range(4):
        alone = HashRng(7, ids[row : row + 1])
        at = slice(row, row + 1)
        assert alone.uniform(pos[at], "a") == whole.uniform(pos, "a")[at]
        assert alone.draw(weight[at], pos[at], "a") == whole.draw(weight, pos, "a")[at]
    others = [whole.uniform(pos, "b"), whole.uniform(pos + 1, "a"), HashRng(8, ids).uniform(pos, "a")]
    assert all((whole.uniform(pos, "a") != other).all() for other in others)
    assert len(set(whole.uniform(pos, "a").tolist())) == 4


def test_coins_are_the_same_in_every_process():
    u = HashRng(0, torch.tensor([0, 1])).uniform(torch.tensor([0, 1 << 40]), "target")
    assert u.tolist() == [0.5800957114793691, 0.3309742188653455]


def test_coins_are_uniform_along_every_key():
    n, cells = 40_000, 50
    keys, one = torch.arange(n), torch.zeros(1, dtype=torch.int64)
    streams = {
        "positions": HashRng(1, torch.zeros(n, dtype=torch.int64)).uniform(keys, "target"),
        "sequences": HashRng(1, keys).uniform(torch.zeros_like(keys), "target"),
        "both": HashRng(1, keys // 200).uniform(keys % 200, "accept1"),
        "seeds": torch.cat([HashRng(s, one).uniform(one, "x") for s in range(2000)]),
        "roles": torch.cat([HashRng(1, one).uniform(one, f"draft{r}") for r in range(2000)]),
    }
    for name, u in streams.items():
        assert u.min() >= 0 and u.max() < 1
        counts = torch.histc(u, cells, 0, 1)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4, name
        assert abs(float(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1])) < 4.5 / len(u) ** 0.5, name
    pairs = torch.stack((streams["positions"], HashRng(1, keys * 0).uniform(keys, "accept1")))
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4.5 / n**0.5


def test_draws_follow_the_weights_whatever_their_scale():
    n = 60_000
    weight = torch.tensor([0.0, 3.0, 0.0, 1e-3, 5.0, 2.0, 0.0])
    for scale in (1e-30, 1.0, 1e30):
        rng = HashRng(3, torch.arange(n))
        drawn = rng.draw((weight * scale).expand(n, -1), torch.zeros(n).long(), "target")
        counts = torch.bincount(drawn, minlength=7).double()
        assert counts[weight == 0].sum() == 0
        expected = (weight / weight.sum() * n).double()[weight > 0]
        assert stats.chisquare(counts[weight > 0], expected * counts.sum() / expected.sum()).pvalue > 1e-4


@pytest.mark.parametrize("width", [1, 511, 512, 513, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_draw_is_the_first_token_whose_running_sum_is_above_the_coin(width, dtype):
    weight = (4 * torch.randn(40, width, dtype=dtype, generator=torch.Generator().manual_seed(0))).softmax(-1)
    weight[0, : width // 2] = 0
    weight[1, (width + 1) // 2 :] = 0
    weight[2] = 1e-38
    rng, pos = HashRng(1, torch.arange(40)), torch.arange(40)
    count = (weight.double() / weight.double().amax(-1, keepdim=True) * 2**40).long().tolist()
    coins = rng.uniform(pos, "target").tolist()
    sums = [list(itertools.accumulate(row)) for row in count]
    expected = [bisect.bisect_right(row, int(coin * row[-1])) for row, coin in zip(sums, coins, strict=True)]
    assert rng.draw(weight, pos, "target").tolist() == expected


def test_the_ends_of_the_coin_never_reach_a_zero_weight():
    class Edge(HashRng):
        at = 0.0

        def uniform(self, pos_B, role):
            return torch.full(pos_B.shape, self.at, dtype=torch.float64)

    rng = Edge(0, torch.zeros(1).long())
    pos = torch.zeros(1).long()
    many = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).tolist()  # totals beyond 2^53
    for weight in ([0, 0, 1, 2, 0], [0, 1e-20, 0], [1, 0, 0], [0, 0, 1], [1 / 3] * 3 + [0], [*many, 0]):
        children = torch.tensor([weight], dtype=torch.float32)
        for at in (0.0, 0.5, 1 - 2**-53):
            rng.at = at
            assert children[0, rng.draw(children, pos, "x")] > 0
    assert rng.draw(torch.zeros(1, 5), pos, "x") == 4
    assert rng.below(torch.tensor([1.0]), pos, "x") and not rng.below(torch.tensor([0.999]), pos, "x")
    rng.at = 0.0
    assert not rng.below(torch.tensor([0.0]), pos, "x")
