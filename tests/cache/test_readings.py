"""Caches that round old tokens: against the hierarchical cache, and against the rounding written out."""

import pytest
import torch

from longtrain.cache.base import Causal
from longtrain.cache.dense import DenseCache
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.cache.readings import Axis, RoundedCache, Rounding, UpperHalfCache, rounded
from longtrain.errors import ConfigError
from longtrain.kernels.hierarchical.layout import BLOCK, Split

L, G, H, D = 2, 1, 2, 64
SIZES = {"n_layers": L, "n_kv_heads": G, "head_dim": D, "max_tokens": 1024, "max_nodes": 16, "device": "cpu"}


def rows_of(batch: int, count: int, gen: torch.Generator) -> torch.Tensor:
    return torch.randn(L, 2, batch, G, count, D, generator=gen) + 2


def step(cache, rows, *, n_B=None) -> list[torch.Tensor]:
    """Write rows, attend from their last one at every layer, accept them."""
    batch, count = rows.shape[2], rows.shape[4]
    n_B = torch.full((batch,), count) if n_B is None else n_B
    cache.expect(n_B)
    outs = []
    for layer in range(L):
        cache.write(layer, *rows[layer])
        q = torch.randn(batch, H, count, D, generator=torch.Generator().manual_seed(count))
        outs.append(cache.attend(layer, q, mask=Causal(), scale=0.125)[0])
    cache.commit(None, n_B)
    return outs


def pair(bits: int, split: Split, batch: int = 2):
    """The hierarchical cache read at these bits, and its twin in full precision."""
    kind = HierarchicalCache if bits == 8 else UpperHalfCache
    real = kind(**SIZES, n_heads=H, batch=batch, dtype=torch.float32, split=split)
    rounding = Rounding(Axis.CHANNEL, Axis.TOKEN, bits, split)
    return real, RoundedCache(**SIZES, batch=batch, dtype=torch.float32, rounding=rounding)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_rounded_cache_reads_what_the_hierarchical_one_reads(bits, split):
    """Prompts of two lengths, then steps over several flushes, each sequence at its own."""
    gen = torch.Generator().manual_seed(bits)
    real, twin = pair(bits, split)
    prompt, n_B = rows_of(2, 400, gen), torch.tensor([400, 270])
    step(real, prompt, n_B=n_B)
    step(twin, prompt, n_B=n_B)
    for _ in range(14):
        rows = rows_of(2, 16, gen)
        most_B = real.commit_limit()
        assert torch.equal(most_B, twin.commit_limit())
        n_B = most_B.clamp(max=16)
        for a, b in zip(step(real, rows, n_B=n_B), step(twin, rows, n_B=n_B), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
        assert torch.equal(real.blocks_B, twin.blocks_B) and torch.equal(real.len_B, twin.len_B)
    assert real.blocks_B.tolist() == [3, 2]  # of 400 + 14 * 16 tokens or a few less; some after the prompt


def test_the_twin_is_no_plain_cache():
    gen = torch.Generator().manual_seed(0)
    _, twin = pair(4, Split.FLOOR, batch=1)
    plain = DenseCache(**SIZES, batch=1, dtype=torch.float32)
    prompt, rows = rows_of(1, 300, gen), rows_of(1, 2, gen)
    first = [step(one, prompt) for one in (twin, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*first, strict=True))  # a prompt is read as it is
    second = [step(one, rows) for one in (twin, plain)]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(*second, strict=True))
    assert torch.equal(twin.k_LBGSD[..., BLOCK:300, :], plain.k_LBGSD[..., BLOCK:300, :])


def test_groups_run_along_the_axis():
    """Numbers that differ along one axis only lose nothing when their groups run along the other."""
    x = torch.linspace(-3, 5, D).expand(1, BLOCK, D)
    exact = Rounding(bits=8)
    assert (
        rounded(x, Axis.CHANNEL, exact) - x
    ).abs().max() < 4e-3  # each group is one number: fp16's rounding
    per_token = (rounded(x, Axis.TOKEN, exact) - x).abs().max()
    assert per_token > 4e-3 and per_token <= 8 / 255  # the step of a range of 8
    y = x.transpose(1, 2)[:, :D].repeat(1, 2, 2)
    assert (
        (rounded(y, Axis.TOKEN, exact) - y).abs().max()
        < 4e-3
        < (rounded(y, Axis.CHANNEL, exact) - y).abs().max()
    )


@pytest.mark.parametrize("axis", Axis)
def test_errors_are_within_half_a_step(axis):
    gen = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(G, 2 * BLOCK, D, generator=gen)
    dim = -2 if axis is Axis.CHANNEL else -1
    groups = x.unflatten(1, (2, BLOCK))
    span = (groups.amax(dim, keepdim=True) - groups.amin(dim, keepdim=True)).expand_as(groups).flatten(1, 2)
    for split, bits, part in (
        (Split.FLOOR, 8, 510),
        (Split.RTN, 8, 240),
        (Split.FLOOR, 4, 31),
        (Split.RTN, 4, 30),
    ):
        error = (rounded(x, axis, Rounding(bits=bits, split=split)) - x).abs()
        assert (error <= span / part * 1.02 + 4e-3).all() and (error > span / part / 2).any()


def test_other_bits_are_refused():
    with pytest.raises(ConfigError, match="rounding to 5 bits; allowed: 4, 8"):
        Rounding(bits=5)
