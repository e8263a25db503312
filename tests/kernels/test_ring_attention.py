"""Ring attention against its definition, compiled for compute capability 9.0, and on a GPU."""

import os

import pytest
import torch
from ring_cases import W, case

from longtrain.kernels.ring_attention import ring_attention


@pytest.mark.parametrize("sinks", [0, 3, 8])
@pytest.mark.parametrize("ahead", [0, 4])
def test_what_a_node_sees(ahead, sinks):
    """Position by position: which are held, which are near enough, sinks, which nodes are seen."""
    q, k, v, (since, end), sees = case(6, 2, dtype=torch.float64, sinks=sinks)
    got = ring_attention(q, k, v, (since, end), sees, window=W, ahead=ahead, scale=0.2, sinks=sinks)
    for b in range(5):
        n = int(end[b])
        near = [p for p in range(max(int(since[b]), sinks), n) if p >= n + ahead - W]
        held = [*range(min(sinks, n)), *(sinks + (p - sinks) % W for p in near)]
        for i in range(2):
            slots = held + [sinks + W + j for j in range(6) if sees[b, i, j]]
            for h in range(4):
                weight = (k[b, h // 2, slots] @ q[b, h, i] * 0.2).softmax(0)
                torch.testing.assert_close(got[b, h, i], weight @ v[b, h // 2, slots])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize(("rows", "sinks"), [(16, 4), (64, 0)])
def test_it_compiles_for_hopper_without_spills(rows, sinks):
    pytest.importorskip("triton", reason="the kernel needs triton")
    import aot

    from longtrain.kernels.ring_attention import kernel as ring_attention_triton

    jit = ring_attention_triton._attend_kernel
    types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "since_ptr": "*i64", "len_ptr": "*i64"}
    types |= {"sees_ptr": "*u8", "out_ptr": "*fp32", "lse_ptr": "*fp32", "scale2": "fp32"}
    constants = {
        "WINDOW": 512,
        "SINKS": sinks,
        "G": 8,
        "GROUP": 4,
        "D": 128,
        "WIDTH": 128,
        "ROWS": rows,
        "KEYS": 64,
    }
    strides = [name for name in jit.arg_names if name[:2] in ("q_", "k_", "v_") and name not in types]
    built = aot.compile_kernel(jit, types, {**constants, "CHAINED": True}, aligned=strides)
    assert built.stack_bytes == 0 and built.registers <= 255
    assert built.count("HGMMA" if rows >= 64 else "HMMA") and built.count("LDG.E.128")


@pytest.mark.gpu
@pytest.mark.parametrize(("nodes", "level", "sinks"), [(1, 1, 0), (20, 16, 0), (20, 16, 4)])
def test_on_a_gpu(nodes, level, sinks):
    how = {"heads": (32, 8), "dim": 128, "sinks": sinks}
    q, k, v, bounds, sees = case(nodes, level, **how)
    expected = ring_attention(q, k, v, bounds, sees, window=W, ahead=1, scale=0.1, sinks=sinks)
    q, k, v, bounds, sees = case(nodes, level, dtype=torch.bfloat16, device="cuda", **how)
    got = ring_attention(q, k, v, bounds, sees, window=W, ahead=1, scale=0.1, sinks=sinks)
    torch.testing.assert_close(got.float().cpu(), expected, rtol=3e-2, atol=3e-2)
