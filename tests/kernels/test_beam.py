"""Best continuations: the kernels interpreted, compiled for compute capability 9.0, and run on a GPU."""

import os

import pytest
import torch
from beam_cases import beam_case, grown

pytest.importorskip("triton", reason="the kernels need triton")


from longtrain.kernels.beam import best_continuations

COMPILED = {
    "_chunk_kernel": ({"F": 16, "COLUMNS": 1024}, 1),
    "_node_kernel": ({"F": 16, "WIDTH": 2048, "CHUNKS": 128}, 4),
    "_level_kernel": (
        {"K": 16, "F": 16, "WIDTH": 256, "CHILDREN": 16, "NODES": 128, "ADDED": 16, "IDS": True},
        2,
    ),
}
"""Constants of a level of 16 nodes at the vocabulary of Llama-3.1, warps."""
LONG = ("key_ptr", "id_ptr", "out_token_ptr", "out_parent_ptr", "tree_token_ptr", "tree_parent_ptr")
TYPES = {"x_ptr": "*bf16", "tree_sees_ptr": "*u8", **dict.fromkeys(LONG, "*i64")}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_hopper_without_spills(name):
    import aot

    from longtrain.kernels.beam import kernel as beam_triton

    constants, warps = COMPILED[name]
    jit = getattr(beam_triton, name)
    types = {arg: "*fp32" for arg in jit.arg_names if arg.endswith("_ptr")}
    types |= {"token_ptr": "*i32", "temperature": "fp32"} | TYPES
    constants = {**constants, "CHAINED": True}
    built = aot.compile_kernel(jit, types, constants, aligned=["x_m", "V"], warps=warps)
    assert built.stack_bytes == 0 and built.registers <= 168


@pytest.mark.gpu
def test_on_a_gpu():
    """Distinct logits, so that there is one answer."""
    logits = torch.stack([torch.randperm(128256) for _ in range(32)]).view(2, 16, -1) * 1e-4
    score = -torch.rand(2, 16)
    expected = best_continuations(logits.double(), score.double(), 16, 0.9)
    got = best_continuations(logits.cuda(), score.cuda(), 16, 0.9)
    torch.testing.assert_close(got[2].double().cpu(), expected[2], rtol=1e-4, atol=1e-4)
    picked = logits.double()[torch.arange(2)[:, None], got[1].cpu(), got[0].cpu()] / 0.9
    lse = (logits.double() / 0.9).logsumexp(-1).gather(1, got[1].cpu())
    total = picked - lse + score.double().gather(1, got[1].cpu())
    torch.testing.assert_close(total, expected[2], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [0, 3])
def test_a_tree_on_a_gpu(beyond):
    logits, ids, root = beam_case(renamed=True)
    expected, expected_score = grown(root, logits, ids, beyond)
    got, score = grown(root.cuda(), [x.cuda() for x in logits], ids.cuda(), beyond)
    assert torch.equal(got.tokens_BN.cpu(), expected.tokens_BN)
    assert torch.equal(got.parents_BN.cpu(), expected.parents_BN)
    assert torch.equal(got.sees_BNN.cpu(), expected.sees_BNN)
    torch.testing.assert_close(score.cpu(), expected_score)
