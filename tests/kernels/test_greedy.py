"""Greedy choices: the kernels interpreted, compiled for compute capability 9.0, and run on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton")

from greedy_cases import trees

from longtrain.kernels import greedy

COMPILED = {
    "_best_kernel": ({"COLUMNS": 2048}, {"x_ptr": "*bf16", "top_ptr": "*fp32", "at_ptr": "*i32"}, 4),
    "_best_of_chunks_kernel": ({"WIDTH": 64}, {"top_ptr": "*fp32", "at_ptr": "*i32", "out_ptr": "*i64"}, 1),
    "_settle_kernel": ({"P": 6, "WIDTH": 8}, {}, 1),
    "_ancestors_kernel": ({"ROWS": 16, "NODES": 128}, {"out_ptr": "*u8"}, 1),
    "_follow_kernel": ({"LEVELS": 5, "NODES": 128, "MOST": True}, {}, 1),
}
"""Constants at the shape of Llama-3.1-8B, types that are not `*i64` pointers, warps."""


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_hopper_without_spills(name):
    import aot

    from longtrain.kernels.greedy import kernel as greedy_triton

    constants, types, warps = COMPILED[name]
    jit = getattr(greedy_triton, name)
    pointers = {arg: "*i64" for arg in jit.arg_names if arg.endswith("_ptr")}
    constants = {**constants, "CHAINED": True}
    binary = aot.compile_kernel(jit, {**pointers, **types}, constants, aligned=["x_m", "V"], warps=warps)
    assert binary.stack_bytes == 0 and binary.registers <= 128
    assert binary.count("LDG.E.128") or name != "_best_kernel"


def test_paths_are_cut_where_a_limit_is():
    best, tokens, parents = (torch.tensor([row]) for row in ([4, 5, 6, 7], [9, 4, 5, 6], [-1, 0, 1, 2]))
    for most, n, after in ((None, 4, 7), (9, 4, 7), (4, 4, 7), (3, 3, 6), (1, 1, 4)):
        limit = None if most is None else torch.tensor([most])
        path, n_B, next_B = greedy.follow(best, tokens, parents, 3, limit)
        assert (path.tolist(), n_B.tolist(), next_B.tolist()) == ([[0, 1, 2, 3]], [n], [after])


@pytest.mark.gpu
def test_on_a_gpu():
    x = torch.randint(0, 5000, (2, 3, 128256), device="cuda").bfloat16()
    assert torch.equal(greedy.argmax_rows(x), (x == x.amax(-1, keepdim=True)).int().argmax(-1))
    for seed in range(20):
        best, tokens, parents, levels = trees(5, 69, 3, seed)
        most = 1 + torch.arange(5) % (levels + 2)
        expected = greedy.follow(best, tokens, parents, levels, most)
        got = greedy.follow(best.cuda(), tokens.cuda(), parents.cuda(), levels, most.cuda())
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
        news, there = torch.empty(5, levels + 3, dtype=torch.int64), tokens.cuda().new_empty(5, levels + 3)
        texts = expected[2].clone(), most % 3, most
        moved = tuple(text.cuda() for text in texts)
        made = greedy.settle(tokens, expected, texts, news), greedy.settle(tokens.cuda(), got, moved, there)
        assert torch.equal(there.cpu(), news)
        assert all(
            torch.equal(a.cpu(), b) for a, b in zip((*made[1], *moved), (*made[0], *texts), strict=True)
        )
