"""The plumbing around the flash operators, on a CPU: fp64 twins of their contract play the operators.

What the real operators give is tested by the GPU tests of `test_packed_attention.py`.
"""

import pytest
import torch

from longtrain.kernels.attention import flash
from longtrain.kernels.attention import packed as kernel
from longtrain.kernels.attention.packed import packed_attention, packed_lse
from tests.kernels import plain_attention as reference

CALLS = []


def scores(q, k, cu_q, cu_k, causal, scale, left, right):
    """[H, T, S] scaled scores, -inf in other segments and beyond the diagonal or window."""
    T, S = len(q), len(k)
    seen = torch.zeros(T, S, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        diagonal = torch.arange(q0, q1)[:, None] - q1 + k1
        key = torch.arange(k0, k1)
        block = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if causal or right == 0:
            block &= key <= diagonal
        if left is not None:
            block &= key >= diagonal - left
        seen[q0:q1, k0:k1] = block
    wide_k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("thd,shd->hts", q, wide_k) * scale).masked_fill(~seen, -torch.inf)


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left=None,
            window_size_right=None):  # fmt: skip
    CALLS.append(("forward", len(q), len(k)))
    assert all(x.stride(-1) == 1 for x in (q, k, v)) and dropout == 0 and not debug and max_q >= 2
    score = scores(q, k, cu_q.tolist(), cu_k.tolist(), causal, scale, window_size_left, window_size_right)
    lse = torch.logsumexp(score, -1)
    assert lse.isfinite().all()  # rows that see nothing never reach the kernel
    wide_v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    seed, offset = torch.tensor([7]), torch.tensor([8])
    return torch.einsum("hts,shd->thd", torch.exp(score - lse[..., None]), wide_v), lse, seed, offset, None


def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, *, scale,
             window_size_left=None, window_size_right=None):  # fmt: skip
    CALLS.append(("backward", len(q), len(k)))
    assert (seed.item(), offset.item(), dropout) == (7, 8, 0)
    g = q.shape[1] // k.shape[1]
    score = scores(q, k, cu_q.tolist(), cu_k.tolist(), causal, scale, window_size_left, window_size_right)
    weight = torch.exp(score - lse[..., None])
    wide_k, wide_v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    d_score = (
        weight * (torch.einsum("thd,shd->hts", grad, wide_v) - (grad * out).sum(-1).T[..., None]) * scale
    )
    dk, dv = torch.einsum("hts,thd->shd", d_score, q), torch.einsum("hts,thd->shd", weight, grad)
    fold = [x.view(len(k), k.shape[1], g, -1).sum(2) for x in (dk, dv)]
    return torch.einsum("hts,shd->thd", d_score, wide_k), *fold


@pytest.fixture(autouse=True)
def played(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    monkeypatch.setattr(kernel, "flash_serves", lambda q, k: True)
    monkeypatch.setattr(flash, "_FLASH_ATTN", False)
    monkeypatch.setattr(flash, "wholes_pay", lambda device: True)
    monkeypatch.setattr(flash, "BLOCK", 4)
    CALLS.clear()


CASES = {
    "documents": ((0, 4, 5, 12), (0, 4, 5, 12), None),
    "long memory first": ((0, 3, 7, 9), (0, 15, 19, 21), None),
    "long memory last": ((0, 3, 7), (0, 3, 20), None),
    "long memories between": ((0, 2, 4, 6, 8), (0, 2, 13, 15, 30), None),
    "shifted": ((0, 6, 11), (0, 4, 7), None),
    "gaps of q and k": ((0, 3, 6, 6, 9), (0, 3, 3, 5, 20), None),
    "rows outside": ((2, 5, 7), (1, 4, 19), None),
    "window": ((0, 4, 10), (0, 9, 15), 4),
    "lone queries": ((0, 1, 2), (0, 3, 12), None),
}


def tensors(q_bounds, k_bounds):
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(q_bounds[-1] + 1, 4, 8, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, k_bounds[-1] + 2, 2, 8, generator=rng, dtype=torch.float64)
    return q, k, v


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen memory", "trained memory"])
@pytest.mark.parametrize("case", CASES)
def test_segments_reach_the_operators_and_come_back(case, frozen):
    q_bounds, k_bounds, window = CASES[case]
    q, k, v = tensors(q_bounds, k_bounds)
    leaves = [q.requires_grad_()] if frozen else [x.requires_grad_() for x in (q, k, v)]
    args = {"scale": 0.3, "window": window}
    out = packed_attention(q, k, v, q_bounds, k_bounds, **args)
    expected = reference.packed_attention(q, k, v, q_bounds, k_bounds, **args)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    got = torch.autograd.grad(out, leaves, cotangent)
    expected = torch.autograd.grad(expected, leaves, cotangent)
    near = 1e-6 if frozen else 1e-12  # the blocks' dQ add up in fp32
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=near, rtol=near)


@pytest.mark.parametrize("case", CASES)
def test_sums_of_exponentials_are_those_of_the_plain_pass(case, monkeypatch):
    q_bounds, k_bounds, window = CASES[case]
    q, k, _ = tensors(q_bounds, k_bounds)
    got = packed_lse(q, k, q_bounds, k_bounds, scale=0.3, window=window)
    assert len(CALLS) == 1
    monkeypatch.setattr(kernel, "flash_serves", lambda q, k: False)
    expected = packed_lse(q, k, q_bounds, k_bounds, scale=0.3, window=window)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


def test_a_frozen_memory_is_gone_over_in_blocks_and_a_trained_one_is_not():
    bounds = (0, 3), (0, 15)
    q, k, v = tensors(*bounds)
    packed_attention(q.requires_grad_(), k, v, *bounds, scale=0.3).sum().backward()
    assert [n_k for name, _, n_k in CALLS if name == "backward"] == [4, 4, 4, 3]
    CALLS.clear()
    packed_attention(q, k.requires_grad_(), v, *bounds, scale=0.3).sum().backward()
    assert [n_k for name, _, n_k in CALLS if name == "backward"] == [15]


def test_documents_of_a_row_share_one_call():
    bounds = tuple(range(0, 40, 5))
    q, k, v = tensors(bounds, bounds)
    packed_attention(q, k, v, bounds, bounds, scale=0.3)
    assert CALLS == [("forward", 35, 35)]


@pytest.mark.parametrize("learns", ["", "q", "qkv"])
def test_long_segments_are_attended_whole(monkeypatch, learns):
    """In rows of few different numbers: what stands behind a segment's own rows is seen by none of them."""
    monkeypatch.setattr(flash, "_LARGE", 33 * 8)
    whole: list[torch.Size] = []
    attention = flash.scaled_dot_product_attention
    monkeypatch.setattr(
        flash,
        "scaled_dot_product_attention",
        lambda q, *a, **k: (whole.append(q.shape), attention(q, *a, **k))[1],
    )
    bounds = (0, 9, 50, 60, 96, 132, 165, 166)  # 41 rows, which take 42, twice 36, and 33, which take 34
    q, k, v = tensors(bounds, bounds)
    leaves = [x.requires_grad_() for x, name in ((q, "q"), (k, "k"), (v, "v")) if name in learns]
    out = packed_attention(q, k, v, bounds, bounds, scale=0.3)
    expected = reference.packed_attention(q, k, v, bounds, bounds, scale=0.3, window=None)
    torch.testing.assert_close(out, expected)
    assert [rows for name, rows, _ in CALLS if name == "forward"] == [9, 10, 1]
    assert [(shape[0], shape[2]) for shape in whole] == [(1, 42), (2, 36), (1, 34)]
    if leaves:
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        got, expected = (torch.autograd.grad(one, leaves, cotangent) for one in (out, expected))
        torch.testing.assert_close(got, expected)


def test_where_whole_sequences_have_no_faster_kernel(monkeypatch):
    """Long segments go with the short ones, and a frozen memory is gone over in blocks all the same."""
    monkeypatch.setattr(flash, "wholes_pay", lambda device: False)
    monkeypatch.setattr(flash, "_LARGE", 33 * 8)
    q_bounds, k_bounds = (0, 9, 50, 53), (0, 9, 50, 65)
    q, k, v = tensors(q_bounds, k_bounds)
    packed_attention(q.requires_grad_(), k, v, q_bounds, k_bounds, scale=0.3).sum().backward()
    assert [rows for name, rows, _ in CALLS if name == "forward"] == [50, 3]
    assert [keys for name, _, keys in CALLS if name == "backward"][-1] == 50
    assert sorted(keys for name, _, keys in CALLS if name == "backward")[:3] == [3, 4, 4]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("q_bounds", "k_bounds"),
    [((0, 37, 74), (0, 37, 74)), ((0, 36, 40, 76), (0, 36, 36, 72)), ((0, 36, 36, 72), (0, 36, 40, 76))],
    ids=["lengths that lack rows", "rows between", "keys between"],
)
def test_long_segments_that_share_no_call(monkeypatch, q_bounds, k_bounds, gradient):
    """Two of one length that a single call of whole sequences would mix up."""
    monkeypatch.setattr(flash, "_LARGE", 33 * 8)
    q, k, v = tensors(q_bounds, k_bounds)
    out = packed_attention(q.requires_grad_(gradient), k, v, q_bounds, k_bounds, scale=0.3)
    expected = reference.packed_attention(q, k, v, q_bounds, k_bounds, scale=0.3, window=None)
    torch.testing.assert_close(out, expected)
    assert not CALLS
