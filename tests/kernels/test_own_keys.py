"""Segments and own keys in one softmax: the masked twin, the merged flash form and its gradient by hand.

On a CPU fp64 stand-ins for flash's operators (`test_flash.py`) play the kernel; on a GPU it runs itself.
"""

from __future__ import annotations

import pytest
import torch

from longtrain.errors import DataError
from longtrain.kernels.attention import flash, own_keys
from longtrain.kernels.attention.own_keys import OwnKey, own_keys_attention
from longtrain.kernels.tree_attention.reference import masked_attention
from tests.kernels import test_flash as stand_ins

CASES = {
    "square": ((0, 9), (0, 9), None),
    "documents": ((0, 4, 5, 12), (0, 4, 5, 12), None),
    "long memory first": ((0, 3, 7, 9), (0, 15, 19, 21), None),
    "long memories between": ((0, 2, 4, 6, 8), (0, 2, 13, 15, 30), None),
    "keys outside": ((0, 3, 6, 9), (1, 4, 9, 14), None),
    "window": ((0, 4, 10), (0, 9, 15), 4),
    "window of none": ((0, 6), (0, 8), 0),
}


def tensors(q_bounds, k_bounds, own, *, heads=4, dim=8, dtype=torch.float64, device="cpu"):
    rng = torch.Generator().manual_seed(0)
    rows = (q_bounds[-1], k_bounds[-1] + 2)
    shapes = [(rows[0], heads), (rows[1], 2), (rows[1], 2), *[(rows[0], 2)] * (2 * own)]
    made = [torch.randn(*shape, dim, generator=rng, dtype=torch.float64) for shape in shapes]
    seen = [None if i % 2 else torch.rand(rows[0], generator=rng) < 0.6 for i in range(own)]
    return [x.to(device, dtype).requires_grad_() for x in made], [
        x if x is None else x.to(device) for x in seen
    ]


def with_own(tensors, seen):
    q, k, v, *flat = tensors
    own = [OwnKey(flat[2 * i], flat[2 * i + 1], one) for i, one in enumerate(seen)]
    return q, k, v, own


def dense(q, k, v, own, q_bounds, k_bounds, *, scale, window):
    """One mask over all keys of the segments and all own keys of all rows."""
    T, S = len(q), len(k)
    visible = torch.zeros(T, S + len(own) * T, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(q_bounds, q_bounds[1:], k_bounds, k_bounds[1:], strict=False):
        for row in range(q0, q1):
            last = k1 - q1 + row
            visible[row, max(k0, 0 if window is None else last - window) : last + 1] = True
    for m, one in enumerate(own):
        for row in range(T):
            visible[row, S + m * T + row] = one.visible_T is None or bool(one.visible_T[row])
    keys, values = torch.cat([k, *[o.k_TGD for o in own]]), torch.cat([v, *[o.v_TGD for o in own]])
    flat = [x.transpose(0, 1)[None] for x in (q, keys, values)]
    out, _ = masked_attention(*flat, visible.to(q.device)[None], scale=scale)
    return out[0].transpose(0, 1)


@pytest.fixture(params=["masked", "flash"])
def way(request, monkeypatch):
    monkeypatch.setattr(own_keys, "_ROWS", 3)
    if request.param == "flash":
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", stand_ins.forward)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", stand_ins.backward)
        monkeypatch.setattr(own_keys, "flash_serves", lambda q, k: True)
        monkeypatch.setattr(flash, "BLOCK", 4)
    return request.param


@pytest.mark.corners
@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_every_gradient_equal_the_dense_mask(case, own, way):
    q_bounds, k_bounds, window = CASES[case]
    leaves, seen = tensors(q_bounds, k_bounds, own)
    q, k, v, mine = with_own(leaves, seen)
    args = {"scale": 0.3, "window": window}
    out = own_keys_attention(q, k, v, q_bounds, k_bounds, mine, **args)
    expected = dense(q, k, v, mine, q_bounds, k_bounds, **args)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    got = torch.autograd.grad(out, leaves, cotangent)
    expected = torch.autograd.grad(expected, leaves, cotangent)
    for found, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("bounds", [((0, 3), (0, 4)), ((1, 5), (0, 4)), ((0, 3, 5), (0, 3, 4)), ((0,), (0,))])
def test_rows_without_a_key_are_refused(bounds):
    leaves, _ = tensors((0, 5), (0, 5), 0)
    with pytest.raises(DataError, match="every token"):
        own_keys_attention(*leaves, *bounds, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_flash_equals_the_dense_mask_on_a_gpu(case, dim, monkeypatch):
    """Both read the same rounded inputs; bf16 keeps 8 bits, and gradients sum some roundings."""
    monkeypatch.setattr(flash, "BLOCK", 8)
    q_bounds, k_bounds, window = CASES[case]
    halves, seen = tensors(q_bounds, k_bounds, 3, dim=dim, dtype=torch.bfloat16, device="cuda")
    halves = [x.detach().requires_grad_() for x in halves]
    wides = [x.detach().float().requires_grad_() for x in halves]
    assert flash.flash_serves(halves[0], halves[1])
    args = {"scale": dim**-0.5, "window": window}
    q, k, v, mine = with_own(halves, seen)
    out = own_keys_attention(q, k, v, q_bounds, k_bounds, mine, **args)
    expected = dense(*with_own(wides, seen), q_bounds, k_bounds, **args)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    cotangent = torch.randn(out.shape, device="cuda").bfloat16()
    got = torch.autograd.grad(out, halves, cotangent)
    expected = torch.autograd.grad(expected, wides, cotangent.float())
    for found, exact in zip(got, expected, strict=True):
        assert (found.float() - exact).norm() <= 2e-2 * exact.norm() + 1e-3


@pytest.mark.gpu
def test_the_gradient_of_a_long_prefix_is_not_kept_for_every_head():
    """dK and dV of 64K keys expanded to 32 heads would be 1 GiB; what is asked for is 256 MiB."""
    q = torch.randn(1024, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(65536, 8, 128, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    own = [OwnKey(*torch.randn(2, 1024, 8, 128, device="cuda").bfloat16())]
    out = own_keys_attention(q, k, v, (0, 1024), (0, 65536), own, scale=128**-0.5)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out.float().sum(), (q, k, v))
    assert torch.cuda.max_memory_allocated() - before < 700 * 2**20
