"""Scores of rows: the twin beside loops, the kernels compiled for compute capability 9.0 and on a GPU."""

import os

import pytest
import torch

from longtrain.errors import DataError
from longtrain.kernels.entry_scores import entry_scores, reference


def test_the_twin_takes_each_head_by_itself():
    """Two groups of three KV heads, with keys of their own and shared ones."""
    G, H, D = 3, 2, 8
    for keys in (1, 2):
        q, k = torch.randn(2, 2 * G, H, D).double(), torch.randn(2, 40, keys * G, D).double()
        found = entry_scores(q, k, torch.tensor([40, 17]), groups=G, scale=0.5)
        for b, n in ((0, 40), (1, 17)):
            for x in range(2 * G):
                key = k[b, :n, x if keys == 2 else x % G]
                weights = torch.stack([(key @ q[b, x, h] * 0.5).log_softmax(0) for h in range(H)])
                torch.testing.assert_close(found[b, x, :n], weights.amax(0))
                assert found[b, x, n:].isneginf().all()


def test_sizes_that_do_not_go_together():
    with pytest.raises(DataError, match="4 KV heads"):
        entry_scores(
            torch.zeros(1, 4, 1, 8), torch.zeros(1, 9, 6, 8), torch.ones(1).long(), groups=4, scale=1
        )


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
def test_the_kernels_compile_for_hopper_without_spills():
    """Products of bf16 on tensor cores, keys copied 16 bytes at once while others are multiplied."""
    pytest.importorskip("triton")
    import aot

    from longtrain.kernels.entry_scores import kernel as entry_scores_triton
    from longtrain.kernels.entry_scores.kernel import TILE

    types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "n_ptr": "*i64", "logit_ptr": "*fp32", "lse_ptr": "*fp32"}
    types |= {"score_ptr": "*fp32", "scale": "fp32"}
    sizes = {"G": 8, "SHARE": 1, "H": 4, "D": 128, "WIDTH": 128, "ROWS": 16, "KEYS": TILE.keys}
    constants = {**sizes, "CHUNK": TILE.chunk, "STAGES": TILE.stages, "CHAINED": True}
    strides = ["q_b", "q_x", "q_h", "k_b", "k_s", "k_c", "logit_m"]
    binary = aot.compile_kernel(
        entry_scores_triton.logits_kernel, types, constants, aligned=strides, warps=TILE.warps
    )
    assert binary.stack_bytes == 0 and binary.registers <= 255
    assert binary.count("HMMA") and binary.count("LDGSTS.E.BYPASS.128", binary.loop_of("HMMA"))
    constants = {"H": 4, "HEADS": 4, "CHUNK": TILE.chunk, "TILE": 128, "BLOCK": TILE.block, "CHAINED": True}
    binary = aot.compile_kernel(
        entry_scores_triton.weights_kernel, types, constants, aligned=["logit_m", "S"], warps=4
    )
    assert binary.stack_bytes == 0 and binary.count("LDG.E.128")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_on_a_gpu(dtype):
    """Beside the twin in fp64, with sums in another order: 1e-4; a row's score is the same in any batch."""
    for sets, keys, heads, dim in ((8, 8, 4, 128), (16, 8, 4, 128), (4, 2, 1, 64), (6, 3, 3, 40)):
        groups = min(keys, 8)
        q = torch.randn(3, sets, heads, dim, device="cuda", dtype=dtype)
        k = torch.randn(3, 17001, keys, dim, device="cuda", dtype=dtype)[:, 1:]
        n_B = torch.tensor([17000, 15700, 0], device="cuda")
        found = entry_scores(q, k, n_B, groups=groups, scale=dim**-0.5)
        wide = reference.entry_scores(q.double(), k.double(), n_B, groups, dim**-0.5).float()
        torch.testing.assert_close(found, wide, rtol=0, atol=1e-4)
        for slots in (16000, 1 << 14):  # 16 chunks, a number that kernels would be compiled for
            alone = entry_scores(q[1:2], k[1:2, :slots], n_B[1:2], groups=groups, scale=dim**-0.5)
            assert torch.equal(alone[0], found[1, :, :slots])
