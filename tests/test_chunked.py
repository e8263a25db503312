"""The chunked sum is one ordinary scalar whose gradient is that of the plain sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longtrain.chunked import SharedRows, chunked_sum


def pieces(dtype=torch.float64):
    gen = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=gen).to(dtype)
    return net, torch.randn(11, 5, generator=gen).to(dtype)


def test_equals_plain_sum_and_scales_with_incoming_gradient():
    net, x = pieces()
    net(x).pow(2).sum().mul(0.3).backward()
    outputs = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    loss = chunked_sum(lambda i: net(x[3 * i : 3 * i + 3]).pow(2).sum(), 4, net.parameters())
    (0.3 * loss).backward()
    torch.testing.assert_close(loss, net(x).pow(2).sum().detach(), check_dtype=True)
    for p, g in zip(net.parameters(), outputs, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-13)


def test_no_graph_survives_a_chunk():
    net, x = pieces()
    alive: list[int] = []
    live = 0

    class Track(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            nonlocal live
            live += 1
            ctx.mark = Mark()
            return y.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    class Mark:
        def __del__(self):
            nonlocal live
            live -= 1

    def step(i):
        loss = Track.apply(net(x[i : i + 1])).sum()
        alive.append(live)
        return loss

    chunked_sum(step, 4, net.parameters())
    assert alive == [1, 1, 1, 1]


def test_unused_and_frozen_parameters_and_shared_gradients():
    a, b, c, frozen = (torch.ones(3, dtype=torch.float64, requires_grad=i < 3) for i in range(4))
    loss = chunked_sum(lambda i: ((a + b) * frozen).sum(), 3, [a, b, c, frozen])
    loss.backward()
    # a + b hands one tensor to both: adding in place must not count it twice
    assert a.grad.tolist() == b.grad.tolist() == [3.0] * 3
    assert c.grad is None
    assert frozen.grad is None


def test_chunk_without_gradient_and_no_grad():
    net, x = pieces()
    loss = chunked_sum(lambda i: net(x).sum() if i else torch.tensor(2.0), 2, net.parameters())
    assert loss.requires_grad
    with torch.no_grad():
        again = chunked_sum(lambda i: net(x).sum() if i else torch.tensor(2.0), 2, net.parameters())
    assert not again.requires_grad
    torch.testing.assert_close(loss.detach(), again)
    assert chunked_sum(lambda i: net(x).sum(), 0, net.parameters()) == 0


def test_bf16_parameters_accumulate_in_fp32():
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    # 257 is not a bf16 number, 256 + 1 in bf16 stays 256: only an fp32 sum gets 256 + 8 ones right
    steps = [256.0] + [1.0] * 8
    chunked_sum(lambda i: (weight * steps[i]).sum(), len(steps), [weight]).backward()
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.item() == 264.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_reaches_the_chunks(device):
    net, x = pieces(torch.float32)
    net, x = net.to(device), x.to(device)
    seen = []

    def step(i):
        y = net(x[5 * i : 5 * i + 5])
        seen.append(y.dtype)
        return y.float().pow(2).sum()

    with torch.autocast(device, torch.bfloat16):
        loss = chunked_sum(step, 2, net.parameters())
    loss.backward()
    assert seen == [torch.bfloat16] * 2
    grads = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        (net(x[:5]).float().pow(2).sum() + net(x[5:10]).float().pow(2).sum()).backward()
    for p, g in zip(net.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=2e-2, atol=1e-2)


def attend(net, x, i, k, v):
    """Rows of chunk i read shared rows of all chunks before them, as a layer's keys and values are read."""
    q = net(x[3 * i : 3 * i + 3])
    seen = torch.arange(11)[None] <= torch.arange(3 * i, min(3 * i + 3, 11))[:, None]
    weight = (q @ k.T).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weight @ v).pow(3).sum()


def test_rows_shared_by_the_chunks_pass_their_gradient_on_fp64():
    net, x = pieces()
    keys, values = (nn.Linear(5, 3, dtype=torch.float64) for _ in range(2))
    everything = [*net.parameters(), *keys.parameters(), *values.parameters()]

    def block(b):
        return keys(x[4 * b : 4 * b + 4]), torch.tanh(values(x[4 * b : 4 * b + 4]))

    k, v = keys(x), torch.tanh(values(x))
    total = sum(attend(net, x, i, k, v) for i in range(4))
    outputs = torch.autograd.grad(0.3 * total, everything)
    loss = chunked_sum(lambda i, k, v: attend(net, x, i, k, v), 4, everything, shared=SharedRows(block, 3))
    torch.testing.assert_close(loss.detach(), total.detach(), rtol=1e-13, atol=0)
    for got, expected in zip(torch.autograd.grad(0.3 * loss, everything), outputs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        again = chunked_sum(
            lambda i, k, v: attend(net, x, i, k, v), 4, everything, shared=SharedRows(block, 3)
        )
    torch.testing.assert_close(again, loss.detach(), rtol=1e-13, atol=0)


def test_shared_rows_that_nothing_reads_cost_no_second_pass():
    net, x = pieces()
    made = []

    def block(b):
        made.append(b)
        return (net(x[6 * b : 6 * b + 6]),)

    loss = chunked_sum(lambda i, rows: net(x).sum(), 2, net.parameters(), shared=SharedRows(block, 2))
    assert made == [0, 1]
    loss.backward()
    for p, q in zip(net.parameters(), torch.autograd.grad(2 * net(x).sum(), net.parameters()), strict=True):
        torch.testing.assert_close(p.grad, q)


def test_what_flows_back_to_shared_rows_is_summed_in_fp32():
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    steps = [256.0] + [1.0] * 8
    shared = SharedRows(lambda b: (weight * 1.0,), 1)
    chunked_sum(lambda i, rows: (rows * steps[i]).sum(), len(steps), [weight], shared=shared).backward()
    assert weight.grad.item() == 264.0
