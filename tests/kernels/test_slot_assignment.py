"""Changes of slots: the kernel compiled for compute capability 9.0, and on a GPU beside torch."""

import os

import pytest
from slot_assignment_cases import same_as_torch


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
def test_the_kernel_compiles_for_hopper_without_spills():
    pytest.importorskip("triton")
    import aot

    from longtrain.kernels.slot_assignment import kernel as slot_assignment_triton

    jit = slot_assignment_triton._change_kernel
    types = {arg: "*i64" for arg in jit.arg_names if arg.endswith("_ptr")}
    types |= {"mark_ptr": "*i32", "due_ptr": "*i1"}
    constants = {"WIDTH": 2048, "SEARCHES": 12}
    binary = aot.compile_kernel(jit, types, constants, aligned=["idx_b", "idx_x"], warps=8)
    assert binary.stack_bytes == 0 and binary.registers <= 128


@pytest.mark.gpu
def test_slots_change_on_a_gpu_as_in_torch():
    same_as_torch("cuda")
    same_as_torch("cuda", rows=2048, length=20000, steps=5)
