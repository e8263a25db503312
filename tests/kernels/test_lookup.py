"""Drafts copied from a text: the kernels compiled for compute capability 9.0, and run on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton")

from lookup_cases import rings

from longtrain.kernels import lookup

COMPILED = {
    "_search_kernel": ({"W": 3, "SLOTS": 1024}, {"ring_ptr": "*i32", "best_ptr": "*i32"}, 4),
    "_copy_kernel": (
        {"W": 3, "N": 17, "WIDTH": 32, "PARTS": 256},
        {"ring_ptr": "*i32", "best_ptr": "*i32"},
        1,
    ),
    "_put_kernel": ({"W": 3, "WIDTH": 32}, {"ring_ptr": "*i32"}, 1),
}
"""Constants, types that are not `*i64` pointers, warps."""


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_hopper_without_spills(name):
    import aot

    from longtrain.kernels.lookup import kernel as lookup_triton

    constants, types, warps = COMPILED[name]
    jit = getattr(lookup_triton, name)
    pointers = {arg: "*i64" for arg in jit.arg_names if arg.endswith("_ptr")}
    binary = aot.compile_kernel(jit, {**pointers, **types}, {**constants, "CHAINED": True}, warps=warps)
    assert binary.stack_bytes == 0 and binary.registers <= 128


@pytest.mark.gpu
def test_on_a_gpu():
    for seed in range(5):
        for slots in (32, 65536):
            ring, last = rings(3, slots, seed)
            moved, root = ring.cuda(), torch.arange(len(last)) % 3
            expected = lookup.extend(ring, 3, root, last, 8)
            assert torch.equal(lookup.extend(moved, 3, root.cuda(), last.cuda(), 8).cpu(), expected)
            lookup.put(ring, 3, expected, last + 1, root + 4)
            lookup.put(moved, 3, expected.cuda(), last.cuda() + 1, root.cuda() + 4)
            assert torch.equal(moved.cpu(), ring)
