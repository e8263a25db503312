"""Attention that starts while the kernel in front of it ends: what that one writes is read after its end."""

import pytest
import torch
from attention_cases import dense_case, hier_case

from longtrain.kernels import devices
from longtrain.kernels.fused_layer import Slots, write_rows
from longtrain.kernels.hierarchical.attention import hier_attention
from longtrain.kernels.hierarchical.layout import RING, Lens, Split
from longtrain.kernels.tree_attention import CAUSAL, tree_attention

STEPS = 24
SCALE = 2.0
"""Large, so that a row's result is far from another's."""


def in_a_graph(work):
    """What the second replay of a CUDA graph gives; the first one finds other results in its buffers."""
    torch.cuda.synchronize()  # the buffers are in use until then
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return out


def alone_and_chained(monkeypatch, work):
    """Results of kernels that run one after another, and of kernels that start early."""
    assert devices.CHAINED and devices.chaining(torch.device("cuda"))["CHAINED"], "not on this GPU"
    monkeypatch.setattr(devices, "CHAINED", False)
    alone = work()
    monkeypatch.setattr(devices, "CHAINED", True)
    return alone, in_a_graph(work)


@pytest.fixture
def hopper():
    if not devices.hopper(torch.device("cuda")):
        pytest.skip("needs compute capability 9.0 or more")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3, 250, 9000, 30000])
@pytest.mark.parametrize("T", [1, 4, 7, 16])
def test_a_step_reads_what_the_one_before_wrote(monkeypatch, hopper, T, n):
    """Rows of a step are the queries and last keys of the next, at the prefix's end or behind it.

    The longest prefix is one whose first tiles are asked for early.
    """
    q, k, v, len_B = dense_case(
        H=8, G=2, T=T, D=128, S=n + 2 * T, lens=(n,), nodes=2 * T, dtype=torch.bfloat16, device="cuda"
    )
    k[:, :, n:], v[:, :, n:] = 1, 1

    def work():
        x = q
        for i in range(STEPS):
            write_rows(x[:, 0::4], x[:, 1::4], Slots(k, v, len_B))
            at_B, mask = (len_B + T, None) if i % 4 == 3 else (len_B, CAUSAL)
            x, _ = tree_attention(x, k, v, at_B, mask, scale=SCALE)
        return x

    alone, chained = alone_and_chained(monkeypatch, work)
    assert alone.isfinite().all() and torch.equal(alone, chained)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("blocks", [0, 1, 70, 300])
@pytest.mark.parametrize("T", [1, 4, 7])
def test_a_step_over_quantised_blocks_reads_what_the_one_before_wrote(monkeypatch, hopper, T, blocks, bits):
    q, planes, ring, lens = hier_case(
        split=Split.FLOOR, H=8, T=2 * T, D=128, blocks=(blocks,), dtype=torch.bfloat16, device="cuda"
    )
    q = q[:, :, :T]
    later = Lens(lens.len_B + T, lens.blocks_B)

    def work():
        x = q
        for i in range(STEPS):
            write_rows(x[:, 0::4], x[:, 1::4], Slots(ring.k, ring.v, lens.len_B, wrap=RING))
            at, mask = (later, None) if i % 2 else (lens, CAUSAL)
            x, _ = hier_attention(x, planes, ring, at, mask, bits=bits, scale=SCALE / 100)
        return x

    alone, chained = alone_and_chained(monkeypatch, work)
    assert alone.isfinite().all() and torch.equal(alone, chained)
