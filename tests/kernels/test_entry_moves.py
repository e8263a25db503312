"""Moves of rows: torch beside entries moved one by one, the kernel compiled for compute capability 9.0 and on
a GPU."""

import os

import pytest
import torch
from entry_move_cases import move_case, written_out

from longtrain.kernels.entry_moves import Programs, move_entries


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("paged", ["", "goal", "source"])
def test_the_twin_moves_rows(paged, parts):
    for seed, counted in ((0, True), (1, True), (2, False)):
        goal, source, lists, pages = move_case(paged=paged, counted=counted, parts=parts, seed=seed)
        expected = written_out(goal, source, lists, pages)
        assert not torch.equal(goal, expected)
        move_entries(goal, source, lists, **pages)
        assert torch.equal(goal, expected)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize(
    ("size", "parts", "rows", "warps"),
    [(0, 1, 16, 4), (0, 2, 16, 4), (128, 1, 16, 4), (0, 2, 64, 8), (128, 1, 64, 8)],
)
def test_the_kernel_compiles_for_hopper_without_spills(size, parts, rows, warps):
    """Rows of 512 bytes in one part or more, 16 bytes of them a thread and load."""
    pytest.importorskip("triton")
    import aot

    from longtrain.kernels.entry_moves import kernel as entry_moves_triton

    jit = entry_moves_triton._move_kernel
    types = {arg: "*i64" for arg in jit.arg_names if arg.endswith("_ptr")}
    types |= {"goal_ptr": "*bf16", "source_ptr": "*bf16"}
    constants = {"P": parts, "E": 256, "WIDTH": parts * 256, "ROWS": rows // parts, "COUNTED": True}
    constants |= {"GOAL_SIZE": 0, "SOURCE_SIZE": size}
    strides = [f"{side}_{dim}" for side in ("goal", "source") for dim in "lbgrp"]
    binary = aot.compile_kernel(jit, types, constants, aligned=strides, warps=warps)
    assert binary.stack_bytes == 0 and binary.registers <= 128
    assert binary.count("LDG.E.128") and binary.count("STG.E.128")


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("host", ["goal", "source"])
def test_rows_of_pinned_memory_on_a_gpu(host, parts):
    goal, source, lists, _ = move_case(parts=parts, device="cuda")
    expected = written_out(goal.cpu(), source.cpu(), lists, {})
    if host == "goal":
        goal = goal.cpu().contiguous().pin_memory()
    else:
        source = source.cpu().contiguous().pin_memory()
    move_entries(goal, source, lists, programs=Programs(1))
    torch.cuda.synchronize()
    assert torch.equal(goal.cpu(), expected)
