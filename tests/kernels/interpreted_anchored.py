"""Run by test_interpreted.py under TRITON_INTERPRET=1: blocks over shared and own keys, on a CPU."""

import pytest
import torch

from longtrain.kernels.anchored import _kernels_serve, anchored_attention, launch
from tests.kernels.test_anchored_attention import inputs, ours, plain, with_gradients

ODD = {"anchors": (0, 3, 4, 9, 39, 40, 43, 60, 61, 62, 100, 139), "bounds": (0, 40, 41, 140)}
"""Blocks without, with few and with many keys before them; documents begin at several."""
NEAR = {"anchors": (30, 31, 32, 34, 36, 38, 38, 47, 48, 64, 70), "bounds": (0, 80)}
"""Many blocks see the same keys, and two begin at the same."""
FEW = {"anchors": (30, 36, 36, 70), "bounds": (0, 80)}
ONE = {"anchors": (5,), "bounds": (0, 9)}
NONE = {"anchors": (0, 0), "bounds": (0, 0, 0)}
CASES = {
    "rows of a block fill no tile": (ODD, (4, 2), 5, 16, None),
    "a window": (ODD, (2, 1), 5, 16, 7),
    "a window of one key": (ODD, (1, 1), 3, 16, 1),
    "a window longer than all": (FEW, (6, 1), 4, 24, 500),
    "seven heads, a window over near blocks": (NEAR, (7, 1), 3, 16, 33),
    "blocks of more rows than a tile": (FEW, (1, 1), 37, 16, None),
    "one block": (ONE, (2, 2), 4, 40, None),
    "no keys": (NONE, (2, 1), 4, 16, None),
}


@pytest.mark.parametrize(("case", "heads", "rows", "dim", "window"), CASES.values(), ids=CASES)
def test_output_and_gradients(case, heads, rows, dim, window):
    """fp32 keeps 24 bits; beside one softmax of each block in fp64, and the reference implementation."""
    tensors = inputs(heads, rows, torch.float32, dim=dim, anchors=case["anchors"], keys=case["bounds"][-1])
    assert _kernels_serve(*tensors)
    exact = [x.double() for x in tensors]
    expected, gradients = with_gradients(lambda *x: plain(*x, scale=0.3, window=window, **case), exact)
    out, got = with_gradients(ours(window, **case), tensors)
    same, others = with_gradients(ours(window, **case), exact)
    for one, other, truth in zip((out, *got), (same, *others), (expected, *gradients), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), truth, rtol=2e-5, atol=1e-5)
        torch.testing.assert_close(other, truth, rtol=1e-10, atol=1e-11)


def test_half_precision_in_the_tiles_of_a_gpu():
    """fp16 keeps 11 bits, of weights and of their gradients too."""
    case = {"anchors": (70, 72, 75, 90), "bounds": (0, 96)}
    tensors = inputs((2, 1), 7, torch.float16, dim=64, anchors=case["anchors"], keys=96)
    exact = [x.double() for x in tensors]
    expected, gradients = with_gradients(lambda *x: plain(*x, scale=0.1, window=None, **case), exact)
    out, got = with_gradients(ours(None, 0.1, **case), tensors)
    for one, truth in zip((out, *got), (expected, *gradients), strict=True):
        assert one.dtype == torch.float16
        assert (one.double() - truth).norm() < 2e-3 * truth.norm()


def test_shared_keys_without_a_gradient_and_strided_inputs(monkeypatch):
    """The target's keys are constant: no kernel of keys runs for them. Any strides give the same."""
    q, own_k, own_v, k, v = inputs((2, 1), 4, torch.float32)
    launched = []

    class Counted:
        def __getitem__(self, grid):
            return lambda *args, **options: (launched.append(options["OWN"]), real[grid](*args, **options))

    real = launch.kernel.keys_kernel
    monkeypatch.setattr(launch.kernel, "keys_kernel", Counted())
    with_gradients(ours(30), (q, own_k, own_v, k, v))
    assert launched == [True, False]
    k_wide, v_wide = torch.stack((k, v), -2).unbind(-2)
    assert not k_wide.is_contiguous()
    ends = torch.tensor([0, 0]), torch.tensor([3, 9])
    leaf = q[:2].clone().requires_grad_()
    own = own_k[:2], own_v[:2]
    anchored_attention(leaf, own, (k_wide, v_wide), *ends, scale=0.3, window=30).sum().backward()
    assert launched == [True, False, True]
    again = q[:2].clone().requires_grad_()
    anchored_attention(again, own, (k, v), *ends, scale=0.3, window=30).sum().backward()
    assert torch.equal(leaf.grad, again.grad)
