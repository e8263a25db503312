"""Sums of counts over blocks: the kernel compiled for compute capability 9.0, and run on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton")

from longtrain.decoding.sampling import HashRng
from longtrain.kernels import block_sums as sums


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
def test_the_kernel_compiles_for_hopper_without_spills():
    import aot

    from longtrain.kernels.block_sums.kernel import _BLOCKS, _sums_kernel

    types = {"weight_ptr": "*fp32", "unit_ptr": "*fp64", "sum_ptr": "*i64"}
    constants = {"BLOCKS": _BLOCKS, "BLOCK": sums.BLOCK, "CHAINED": True}
    binary = aot.compile_kernel(_sums_kernel, types, constants, aligned=["weight_b", "V"], warps=4)
    assert binary.stack_bytes == 0 and binary.registers <= 128
    assert binary.count("LDG.E.128")


def test_the_sums_are_those_of_the_counts():
    weight_BV = torch.tensor([[0.5, 0.25, 0.125] * 400, [1.0, *[0.0] * 1199]])
    unit_B1 = torch.full((2, 1), 0.125, dtype=torch.float64)
    sum_BK = sums.block_sums(weight_BV, unit_B1)
    assert sum_BK.sum(-1).tolist() == [400 * 7, 8] and sum_BK.shape == (2, 3)
    assert sum_BK[0, 0] == 7 * 170 + 4 + 2


@pytest.mark.gpu
@pytest.mark.parametrize("V", [512, 4999, 151936])
def test_on_a_gpu(V, monkeypatch):
    weight_BV = (6 * torch.randn(64, V, device="cuda")).softmax(-1)
    rng, pos_B = HashRng(1, torch.arange(64, device="cuda")), torch.arange(64, device="cuda")
    got = rng.draw(weight_BV, pos_B, "target")
    monkeypatch.setattr(sums, "kernels_serve", lambda x: False)
    assert torch.equal(got, rng.draw(weight_BV, pos_B, "target"))
