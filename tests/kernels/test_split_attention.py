import pytest
import torch

from longtrain.kernels.attention.split import split_attention, split_serves
from tests.kernels import plain_attention as reference


def case(dtype, device="cpu", S=700, R=12, D=64):
    rng = torch.Generator().manual_seed(0)
    q = (3 * torch.randn(2, 2, R, D, generator=rng)).to(device, dtype)
    k, v = torch.randn(2, 2, 2, S, D, generator=rng).to(device, dtype)
    visible = torch.rand(2, 1, R, S, generator=rng).to(device) < 0.5
    visible[..., :600] = True
    visible[0, :, 3, 600:] = False  # a row that sees nothing of the rest
    return q, k, v, visible


@pytest.mark.parametrize("prefix", [1, 128, 600])
def test_prefix_and_rest_equal_one_masked_attention(prefix):
    q, k, v, visible = case(torch.float64)
    out, lse = split_attention(q, k, v, prefix, visible[..., prefix:], scale=0.125)
    expected, expected_lse = reference.masked_attention(q, k, v, visible[:, 0], scale=0.125)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


def test_a_cpu_takes_the_plain_path():
    assert not split_serves(torch.zeros(1, 1, 1, 64))
    assert not split_serves(torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_on_a_gpu_it_stays_near_fp32(D):
    q, k, v, visible = case(torch.bfloat16, "cuda", D=D)
    assert split_serves(q)
    out, lse = split_attention(q, k, v, 600, visible[..., 600:], scale=D**-0.5)
    expected, expected_lse = reference.masked_attention(
        q.float(), k.float(), v.float(), visible[:, 0], scale=D**-0.5
    )
    assert (out.float() - expected).norm() <= 4e-3 * expected.norm()
    assert (lse - expected_lse).abs().max() <= 1e-3
