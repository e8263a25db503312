"""Own keys merged with attention that is done: the kernels, interpreted, beside the reference."""

import pytest
import torch

from longtrain.kernels import own_keys as module
from longtrain.kernels.attention import flash, own_keys
from longtrain.kernels.own_keys import OwnKeys, merge, merge_backward, reference
from tests.kernels import test_flash as stand_ins
from tests.kernels import test_own_keys


def case(T, H, G, D, M, dtype, masked):
    gen = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen).to(dtype)

    wide = draw(T, H + 1, D)  # queries with strides of their own
    seen = torch.rand(M, T, generator=gen) < 0.6 if masked else None
    own = OwnKeys(draw(M, T, G, D), draw(M, T, G, D), seen)
    return wide[:, :H], draw(T, H, D), draw(H, T).float().t(), own, draw(T, H, D), draw(T, H, D)


@pytest.mark.corners
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("T", "H", "G", "D", "M", "dtype"),
    [
        (37, 4, 2, 64, 3, torch.float32),
        (5, 3, 3, 80, 1, torch.float32),
        (70, 9, 3, 64, 2, torch.bfloat16),
        (9, 2, 1, 128, 8, torch.float16),
    ],
)
def test_as_the_reference(T, H, G, D, M, dtype, masked):
    q, out, lse, own, grad, dq = case(T, H, G, D, M, dtype, masked)
    assert module._kernels_serve(q, own.k_MTGD)
    near = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    got, expected = merge(q, out, lse, own, scale=0.3), reference.merge(q, out, lse, own, scale=0.3)
    for mine, other in zip(got, expected, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=near, atol=near)
    args = (grad, q, *expected, own, dq)
    for mine, other in zip(
        merge_backward(*args, scale=0.3), reference.merge_backward(*args, scale=0.3), strict=True
    ):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=near, atol=2 * near)


def test_a_tile_that_is_not_full_writes_nothing_beyond_it():
    """Keys that nobody sees change nothing, and what they get is 0."""
    q, out, lse, own, grad, dq = case(33, 2, 1, 64, 2, torch.float32, masked=True)
    blind = own._replace(seen_MT=torch.zeros_like(own.seen_MT))
    new_out, new_lse = merge(q, out, lse, blind, scale=0.3)
    torch.testing.assert_close(new_out, out)
    torch.testing.assert_close(new_lse, lse)
    new_dq, dk, dv = merge_backward(grad, q, new_out, new_lse, blind, dq, scale=0.3)
    torch.testing.assert_close(new_dq, dq)
    assert not dk.any() and not dv.any()


@pytest.mark.parametrize("case_name", test_own_keys.CASES)
def test_flash_and_own_keys_together(case_name, monkeypatch):
    """In fp32 with stand-ins for flash's operators: the output and every gradient, beside masked blocks."""
    q_bounds, k_bounds, window = test_own_keys.CASES[case_name]
    leaves, seen = test_own_keys.tensors(q_bounds, k_bounds, 3, dtype=torch.float32)
    q, k, v, mine = test_own_keys.with_own(leaves, seen)
    args = (q, k, v, q_bounds, k_bounds, mine)
    expected = own_keys.own_keys_attention(*args, scale=0.3, window=window)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", stand_ins.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", stand_ins.backward)
    monkeypatch.setattr(own_keys, "flash_serves", lambda q, k: True)
    monkeypatch.setattr(flash, "BLOCK", 4)
    out = own_keys.own_keys_attention(*args, scale=0.3, window=window)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(out, leaves, cotangent)
    expected = torch.autograd.grad(expected, leaves, cotangent)
    for found, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
