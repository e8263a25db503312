"""Sums of counts over blocks: the kernel, interpreted, beside torch."""

import pytest
import torch

from longtrain.decoding.sampling import HashRng
from longtrain.kernels import block_sums as sums


def weights(V, seed=0):
    """Softmax of steep logits, a distribution with one token, an even one, and one of zeros."""
    draw = torch.Generator().manual_seed(seed)
    steep_BV = (8 * torch.randn(3, V, generator=draw)).softmax(-1)
    one_V = torch.zeros(V)
    one_V[V // 2] = 1.0
    return torch.cat((steep_BV, one_V[None], torch.full((1, V), 1 / V), torch.zeros(1, V)))


@pytest.mark.parametrize("V", [1, 300, 512, 513, 5000, 4 * 512])
def test_sums_and_draws_are_torchs(V, monkeypatch):
    weight_BV, pos_B = weights(V), torch.arange(6)
    unit_B1 = weight_BV.amax(-1, keepdim=True).double().clamp(min=1e-300) / 2**40
    rng = HashRng(3, torch.arange(6))
    got = sums.block_sums(weight_BV, unit_B1), rng.draw(weight_BV, pos_B, "target")
    monkeypatch.setattr(sums, "kernels_serve", lambda x: False)
    expected = sums.block_sums(weight_BV, unit_B1), rng.draw(weight_BV, pos_B, "target")
    assert got[0].shape == (6, V // sums.BLOCK + 1)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert int(got[0][:5].sum(-1).min()) >= 2**40 and not got[0][5].any()
