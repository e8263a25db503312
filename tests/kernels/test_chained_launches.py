"""Attention that starts while the kernel in front of it ends: what that one writes is read after its end."""

import pytest
import torch
from attention_cases import dense_case, forest, hier_case

from longtrain.kernels import devices
from longtrain.kernels.fused_layer import Slots, write_rows
from longtrain.kernels.hierarchical import hier_attention
from longtrain.kernels.hierarchical.layout import RING, Lens, Split
from longtrain.kernels.tree_attention import CAUSAL, tree_attention, tree_bits

STEPS = 24


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


def same_early(monkeypatch, work):
    """Whether kernels that start early give what they give one after another; `work` takes a number of steps.

    A step's result is another than that of the step before, or nobody would see which of them was read.
    """
    monkeypatch.setattr(devices, "CHAINED", False)
    before, alone = work(STEPS - 1), work(STEPS)
    assert alone.isfinite().all() and not torch.equal(before, alone)
    monkeypatch.setattr(devices, "CHAINED", True)
    return torch.equal(alone, in_a_graph(lambda: work(STEPS)))


@pytest.fixture
def hopper():
    if not devices.hopper(torch.device("cuda")):
        pytest.skip("needs compute capability 9.0 or more")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [250, 9000, 30000])
@pytest.mark.parametrize(
    ("T", "tree"), [(1, False), (4, False), (4, True), (7, False), (11, True), (16, False)]
)
def test_a_step_reads_what_the_one_before_wrote(monkeypatch, hopper, T, tree, n):
    """Rows of a step are the queries and keys of the next, behind the prefix or, by turns, at its end."""
    q, k, v, len_B = dense_case(
        H=8, G=2, T=T, D=128, S=n + 2 * T, lens=(n,), nodes=2 * T, dtype=torch.bfloat16, device="cuda"
    )
    k[:, :, n:], v[:, :, n:] = 1, 1
    turns_TT = torch.stack([forest(1, T), forest(1, T)]).cuda()

    def work(steps):
        x = q
        for i in range(steps):
            write_rows(x[:, 0::4], x[:, 1::4], Slots(k, v, len_B))
            mask = tree_bits(turns_TT[i % 2]) if tree else CAUSAL
            if i % 4 == 3:
                x, _ = tree_attention(x, k, v, len_B, None, scale=2.0, base=T)
            else:
                x, _ = tree_attention(x, k, v, len_B, mask, scale=2.0)
        return x

    assert same_early(monkeypatch, work)


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

    def work(steps):
        x = q
        for i in range(steps):
            write_rows(x[:, 0::4], x[:, 1::4], Slots(ring.k, ring.v, lens.len_B, wrap=RING))
            at, mask = (later, None) if i % 2 else (lens, CAUSAL)
            x, _ = hier_attention(x, planes, ring, at, mask, bits=bits, scale=0.3)
        return x

    assert same_early(monkeypatch, work)
