"""Blocks over the keys before their anchors and their own: against one mask of all queries and keys."""

from __future__ import annotations

import pytest
import torch

from longtrain.errors import DataError
from longtrain.kernels.anchored import anchored_attention, reference

BOUNDS = (0, 40, 41, 140)
"""Documents of the shared keys."""
ANCHORS = (0, 3, 4, 9, 39, 40, 43, 60, 61, 62, 100, 139)
"""Blocks without, with few and with many keys before them; documents begin at several."""


def starts(anchors, bounds=BOUNDS):
    return [max(edge for edge in bounds[:-1] if edge <= anchor) for anchor in anchors]


def inputs(heads, rows, dtype, device="cpu", dim=16, anchors=ANCHORS, keys=140):
    gen = torch.Generator().manual_seed(0)
    H, G = heads
    sizes = [(len(anchors), rows, H, dim), *[(len(anchors), rows, G, dim)] * 2, *[(keys, G, dim)] * 2]
    return [torch.randn(size, generator=gen, dtype=torch.float64).to(device, dtype) for size in sizes]


def plain(q, own_k, own_v, k, v, *, scale, window, anchors=ANCHORS, bounds=BOUNDS):
    """One softmax of each block under a mask, written out."""
    out = []
    for n, (anchor, start) in enumerate(zip(anchors, starts(anchors, bounds), strict=True)):
        low = start if window is None else max(start, anchor - window)
        groups = q.shape[2] // k.shape[1]
        keys = torch.cat((k[low:anchor], own_k[n])).repeat_interleave(groups, 1)
        values = torch.cat((v[low:anchor], own_v[n])).repeat_interleave(groups, 1)
        share = (torch.einsum("rhd,chd->hrc", q[n], keys) * scale).softmax(-1)
        out.append(torch.einsum("hrc,chd->rhd", share, values))
    return torch.stack(out)


def with_gradients(function, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    gen = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=gen, dtype=torch.float64).to(out)
    return out, torch.autograd.grad(out, leaves, grad)


def ours(window, scale=0.3, anchors=ANCHORS, bounds=BOUNDS):
    ends = torch.tensor(starts(anchors, bounds)), torch.tensor(anchors)

    def call(q, own_k, own_v, k, v):
        return anchored_attention(q, (own_k, own_v), (k, v), *ends, scale=scale, window=window)

    return call


@pytest.mark.corners
@pytest.mark.parametrize("window", [None, 1, 7, 30, 500])
@pytest.mark.parametrize(("heads", "rows"), [((4, 2), 5), ((3, 3), 1), ((6, 1), 2)])
def test_outputs_and_gradients_equal_the_whole_mask_fp64(window, heads, rows, monkeypatch):
    monkeypatch.setattr(reference, "_SCORES", 139 * rows * heads[0] * 3)  # up to three blocks at once
    tensors = inputs(heads, rows, torch.float64)
    expected, gradients = with_gradients(lambda *x: plain(*x, scale=0.3, window=window), tensors)
    out, got = with_gradients(ours(window), tensors)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    for one, other in zip(got, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_gradients_taken_under_autocast_are_the_same():
    """As a chunked loss takes them: sums stay in fp32 in both directions."""
    tensors = inputs((4, 2), 5, torch.bfloat16)
    expected, gradients = with_gradients(ours(30), tensors)
    with torch.autocast("cpu", torch.bfloat16):
        out, got = with_gradients(ours(30), tensors)
    for one, other in zip((out, *got), (expected, *gradients), strict=True):
        assert torch.equal(one, other)


def test_anchors_out_of_order_or_beyond_the_keys_are_refused():
    q, own_k, own_v, k, v = inputs((4, 2), 5, torch.float64)
    for anchors in ((5, 4, *ANCHORS[2:]), (*ANCHORS[:-1], 141), ANCHORS[:-1]):
        with pytest.raises(DataError, match="ascending anchors"):
            ends = torch.zeros(len(anchors), dtype=torch.int64), torch.tensor(anchors)
            anchored_attention(q, (own_k, own_v), (k, v), *ends, scale=1.0)
