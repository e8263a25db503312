import pytest
import torch

from longtrain.errors import DataError
from longtrain.kernels.attention import flash
from longtrain.kernels.attention import packed as kernel
from longtrain.kernels.attention.packed import packed_attention, packed_lse
from longtrain.kernels.attention.segments import joined, segments, spread
from tests.kernels import plain_attention as reference

CASES = {
    "one square": ((0, 9), (0, 9), None),
    "documents": ((0, 4, 5, 12), (0, 4, 5, 12), None),
    "bottom right": ((0, 3, 7), (0, 8, 17), None),
    "shifted by two": ((0, 6, 11), (0, 4, 7), None),
    "empty keys": ((0, 3, 6, 9), (0, 3, 3, 7), None),
    "empty queries": ((0, 3, 3, 9), (0, 3, 8, 14), None),
    "nothing at all": ((0, 3, 3), (0, 0, 4), None),
    "rows outside": ((2, 5, 7), (1, 4, 9), None),
    "one query each": ((0, 1, 2, 3), (0, 5, 9, 10), None),
    "window": ((0, 11), (0, 11), 3),
    "window of none": ((0, 11), (0, 11), 0),
    "window and halo": ((0, 4, 10), (0, 9, 15), 4),
    "window and shift": ((0, 6, 11), (0, 4, 7), 2),
}


def tensors(q_bounds, k_bounds, *, heads=4, kv_heads=2, dim=8, dtype=torch.float64, extra=2, device="cpu"):
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(q_bounds[-1] + extra, heads, dim, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, k_bounds[-1] + extra, kv_heads, dim, generator=rng, dtype=torch.float64)
    return [x.to(device, dtype).requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)], ids=["gqa", "mha", "mqa"])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_equal_the_dense_mask(case, heads, monkeypatch):
    q_bounds, k_bounds, window = CASES[case]
    monkeypatch.setattr(kernel, "_ROWS", 3)  # several blocks in the smallest segment
    inputs = tensors(q_bounds, k_bounds, heads=heads[0], kv_heads=heads[1])
    args = {"scale": 0.3, "window": window}
    out = packed_attention(*inputs, q_bounds, k_bounds, **args)
    expected = reference.packed_attention(*inputs, q_bounds, k_bounds, **args)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)

    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    if out.requires_grad:
        got = torch.autograd.grad(out, inputs, cotangent, allow_unused=True)
        expected = torch.autograd.grad(expected, inputs, cotangent)
        for mine, theirs in zip(got, expected, strict=True):
            mine = torch.zeros_like(theirs) if mine is None else mine
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    else:
        assert not expected.any()


def test_a_row_sees_keys_up_to_the_bottom_right_diagonal_and_no_further():
    q = torch.zeros(3, 1, 8, dtype=torch.float64)  # equal scores: the output is the mean of what is seen
    k = torch.zeros(5, 1, 8, dtype=torch.float64)
    v = torch.arange(5, dtype=torch.float64)[:, None, None].expand(5, 1, 8)
    full = packed_attention(q, k, v, (0, 3), (0, 5), scale=1.0)[:, 0, 0]
    windowed = packed_attention(q, k, v, (0, 3), (0, 5), scale=1.0, window=1)[:, 0, 0]
    torch.testing.assert_close(full, torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64))
    torch.testing.assert_close(windowed, torch.tensor([1.5, 2.5, 3.5], dtype=torch.float64))


def test_frozen_keys_need_no_gradient():
    q, k, v = tensors((0, 4), (0, 9))
    k, v = k.detach(), v.detach()
    packed_attention(q, k, v, (0, 4), (0, 9), scale=0.3).sum().backward()
    assert q.grad[:4].abs().sum() > 0
    assert k.grad is None and v.grad is None


@pytest.mark.parametrize(
    ("q_bounds", "k_bounds", "window", "message"),
    [
        ((0, 5, 3), (0, 3, 5), None, "q_bounds"),
        ((0, 5), (0, 99), None, "k_bounds"),
        ((0, 5), (0, 3, 5), None, "as many"),
        ((0, 5), (0, 5), -1, "window=-1"),
        ((), (), None, "q_bounds"),
    ],
)
def test_bad_bounds_are_refused(q_bounds, k_bounds, window, message):
    inputs = tensors((0, 5), (0, 5))
    with pytest.raises(DataError, match=message):
        packed_attention(*inputs, q_bounds, k_bounds, scale=1.0, window=window)


def test_heads_that_do_not_divide_are_refused():
    q, k, v = tensors((0, 5), (0, 5), heads=3, kv_heads=2)
    with pytest.raises(DataError, match="multiple"):
        packed_attention(q, k, v, (0, 5), (0, 5), scale=1.0)


def test_segments_trim_rows_that_see_nothing():
    found = segments((0, 3, 6, 9), (0, 3, 3, 5), 9, 5)
    assert [(p.q_start, p.q_stop, p.k_start, p.k_stop) for p in found] == [(0, 3, 0, 3), (7, 9, 3, 5)]


def test_spread_undoes_joined():
    x, spans = torch.arange(10.0)[:, None], [(1, 3), (3, 4), (6, 9)]
    back = spread(joined(x, spans), spans, 10)[:, 0]
    assert back.tolist() == [0, 1, 2, 3, 0, 0, 6, 7, 8, 0]


@pytest.mark.parametrize(("n_q", "n_k"), [(3, 3), (3, 20), (4, 16), (1, 17), (8, 8), (5, 13)])
def test_key_blocks_cover_every_visible_pair_once(n_q, n_k):
    seen = torch.zeros(n_q, n_k, dtype=torch.int)
    for low, high, causal in flash.key_blocks(n_q, n_k, 4):
        tile = torch.ones(n_q, high - low, dtype=torch.int)
        seen[:, low:high] += tile.tril((high - low) - n_q) if causal else tile
    assert torch.equal(seen, torch.ones(n_q, n_k, dtype=torch.int).tril(n_k - n_q))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_flash_equals_the_reference(case, dim):
    """The twin runs in fp32 on the same rounded inputs; bf16 keeps 8 bits, gradients sum some roundings."""
    q_bounds, k_bounds, window = CASES[case]
    halves = tensors(q_bounds, k_bounds, dim=dim, dtype=torch.bfloat16, device="cuda")
    halves = [x.detach().requires_grad_() for x in halves]
    wides = [x.detach().float().requires_grad_() for x in halves]
    assert flash.flash_serves(halves[0], halves[1])
    args = {"scale": dim**-0.5, "window": window}
    out = packed_attention(*halves, q_bounds, k_bounds, **args)
    expected = reference.packed_attention(*wides, q_bounds, k_bounds, **args)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    bounds = q_bounds, k_bounds
    lse = packed_lse(*halves[:2], *bounds, **args)  # the other one takes the plain pass, for it is fp32
    torch.testing.assert_close(lse, packed_lse(*wides[:2], *bounds, **args), atol=1e-3, rtol=1e-3)
    if not out.requires_grad:
        assert not expected.any()
        return
    cotangent = torch.randn(out.shape, device="cuda").bfloat16()
    got = torch.autograd.grad(out, halves, cotangent)
    expected = torch.autograd.grad(expected, wides, cotangent.float())
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.float() - theirs).norm() <= 2e-2 * theirs.norm() + 1e-3


@pytest.mark.gpu
def test_frozen_memory_backward_equals_the_plain_one(monkeypatch):
    monkeypatch.setattr(flash, "BLOCK", 256)
    rng = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(300, 8, 64, device="cuda", generator=rng).bfloat16().requires_grad_()
    k, v = torch.randn(2, 2000, 2, 64, device="cuda", generator=rng).bfloat16()
    bounds = ((0, 200, 300), (0, 1900, 2000))
    out = packed_attention(q, k, v, *bounds, scale=0.125)
    (frozen,) = torch.autograd.grad(out.float().square().sum(), q)
    wide = q.detach().float().requires_grad_()
    expected = reference.packed_attention(wide, k.float(), v.float(), *bounds, scale=0.125)
    (expected,) = torch.autograd.grad(expected.square().sum(), wide)
    assert (frozen.float() - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.gpu
def test_frozen_memory_backward_keeps_no_gradient_of_the_memory():
    """dK and dV of 64K keys expanded to 32 heads would be 1 GiB; the blocks keep an eighth of that."""
    q = torch.randn(1024, 32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = torch.randn(2, 65536, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = packed_attention(q, k, v, (0, 1024), (0, 65536), scale=128**-0.5)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 450 * 2**20
