"""Rules of vLLM: levels, bytes and errors known beforehand, and the cache that applies them."""

import pytest
import torch

from longtrain.cache.base import Causal
from longtrain.cache.dense import DenseCache
from longtrain.cache.engine_rules import RULES, fp8, normal_levels, turbo_keys, turbo_values
from longtrain.cache.named import cache_maker
from longtrain.cache.readings import Rounding
from longtrain.errors import ConfigError

D = 64


def rows(seed: int = 0) -> torch.Tensor:
    x = torch.randn(3, 200, D, generator=torch.Generator().manual_seed(seed))
    x[..., 5] += 12  # one loud channel, as keys have them
    return x


@pytest.mark.parametrize("name", RULES)
def test_what_is_read_can_be_stored_again_without_further_loss(name):
    """Within fp16's rounding of scales: a second pass finds the same codes."""
    rule = RULES[name]
    for apply in (rule.keys, rule.values):
        once = apply(rows())
        assert torch.equal(once, apply(rows())) and not torch.equal(once, rows())
        again = apply(once)
        assert (again - once).norm() <= 0.02 * (once - rows()).norm() + 2e-3 * once.norm()
        alone = apply(rows()[:1, 7:8])
        torch.testing.assert_close(alone, once[:1, 7:8])  # a row of a head is rounded by itself


def test_int8_and_int4_have_the_levels_they_promise():
    x = rows()
    scale = x.abs().amax(-1, keepdim=True) / 127
    read = RULES["int8_per_token_head"].keys(x)
    assert ((read - x).abs() <= scale * 0.501).all()
    assert ((read / scale).round().abs() <= 127).all()
    spread = x.amax(-1) - x.amin(-1)
    straight = ((turbo_values(x, bits=4) - x) ** 2).mean(-1).sqrt()
    turned = ((RULES["int4_per_token_head"].keys(x) - x) ** 2).mean(-1).sqrt()
    assert (straight <= spread / 15 * 0.55).all()
    assert turned.mean() < 0.6 * straight.mean()  # the rotation spreads the loud channel
    assert not RULES["int4_per_token_head"].keys(torch.zeros(1, 1, D)).any()


def test_levels_are_those_of_lloyd_and_max():
    """Max (1960), Table I: 8 levels err by 0.03454 of the variance, 16 by 0.009497; right lengths gain."""
    assert normal_levels(3)[4:] == pytest.approx((0.2451, 0.7560, 1.344, 2.152), abs=5e-4)
    for bits, error in ((3, 0.03454), (4, 0.009497)):
        x = torch.randn(400, 16, 64, generator=torch.Generator().manual_seed(1))
        found = turbo_keys(x, bits=bits)
        assert ((found - x) ** 2).sum() / (x**2).sum() == pytest.approx(error, rel=0.09)
        torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)


def test_fp8_keeps_three_bits_of_a_fraction():
    assert fp8(torch.tensor([1.0, 1.06, 1.07, -500.0])).tolist() == [1.0, 1.0, 1.125, -448.0]


@pytest.mark.parametrize(
    ("name", "at_64", "at_128"),
    [
        ("int8_per_token_head", 1.0625, 1.03125),
        ("int4_per_token_head", 0.5625, 0.53125),
        ("turboquant_k8v4", 0.78125, 0.765625),
        ("turboquant_4bit_nc", 0.546875, 0.5234375),
        ("turboquant_3bit_nc", 0.421875, 0.3984375),
    ],
)
def test_bytes_count_scales(name, at_64, at_128):
    assert RULES[name].bytes_per_number(64) == at_64 and RULES[name].bytes_per_number(128) == at_128


def test_our_bytes_are_those_of_the_planes():
    assert Rounding(bits=8).bytes_per_number(64) == 1 + (4 / 128 + 4 / 64) / 2
    assert Rounding(bits=4).bytes_per_number(64) == RULES["turboquant_4bit_nc"].bytes_per_number(64)


def outs(cache, x_GSD, steps):
    """What the last row of each step reads, the first step being the prompt."""
    found, at = [], 0
    for count in steps:
        part = x_GSD[None, :, at : at + count]
        cache.write(0, part, part)
        found.append(cache.attend(0, part, mask=Causal(), scale=0.125)[0][0, :, -1])
        cache.commit(None, torch.tensor([count]))
        at += count
    return found


def cache_of(**options):
    where = {"device": "cpu", "dtype": torch.float32}
    made = cache_maker("engine", options, n_layers=1, n_heads=3, n_kv_heads=3, head_dim=D, **where)
    return made(1, 512, 4)


@pytest.mark.parametrize("name", ["int4_per_token_head", "turboquant_4bit_nc"])
def test_rows_are_rounded_at_once_or_when_ours_would_be(name):
    x, steps = torch.cat([rows(1), rows(2)], 1), (300, 3, 1)
    read = RULES[name].keys(x), RULES[name].values(x)
    late = outs(cache_of(rule=name), x, steps)
    shape = {"n_layers": 1, "batch": 1, "n_kv_heads": 3, "head_dim": D, "max_tokens": 512, "max_nodes": 4}
    full = outs(DenseCache(**shape, device="cpu", dtype=torch.float32), x, steps)
    torch.testing.assert_close(late[0], full[0])  # the prompt is read as it is
    for at, found in ((302, late[1]), (303, late[2])):
        k, v = (torch.cat((old[:, :128], x[:, 128 : at + 1]), 1) for old in read)
        p = (x[:, at, None] @ k.transpose(1, 2) * 0.125).softmax(-1)
        torch.testing.assert_close(found, (p @ v)[:, 0], rtol=1e-4, atol=1e-5)
    now = outs(cache_of(rule=name, at_once=True), x, steps)
    for at, found in ((299, now[0]), (302, now[1]), (303, now[2])):
        k, v = (old[:, : at + 1] for old in read)
        p = (x[:, at, None] @ k.transpose(1, 2) * 0.125).softmax(-1)
        torch.testing.assert_close(found, (p @ v)[:, 0], rtol=1e-4, atol=1e-5)


def test_unknown_rules_and_heads_are_refused():
    with pytest.raises(ConfigError, match="turboquant_4bit_nc"):
        cache_of(rule="int3")
    with pytest.raises(ConfigError, match="power of two"):
        RULES["int4_per_token_head"].keys(torch.zeros(1, 96))
