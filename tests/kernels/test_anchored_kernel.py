"""Blocks over shared and own keys: the kernels compiled for Hopper, and on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from longtrain.kernels import anchored
from tests.kernels.test_anchored_attention import ours, with_gradients

KERNELS = {"forward_kernel": (0, {}), "queries_kernel": (1, {}), "keys_kernel": (2, {"OWN": False})}


def compiled(name, dim, group, *, capability=90, shared=227 * 1024, **more):
    import aot

    from longtrain.kernels.anchored import kernel, launch

    jit, (which, constants) = getattr(kernel, name), KERNELS[name]
    tile = launch.tiles(dim, torch.bfloat16, shared)[which]
    types = {key: "*bf16" for key in jit.arg_names if key.endswith("_ptr")}
    types |= {key: "*i32" for key in ("low_ptr", "high_ptr", "ranges_ptr")}
    types |= {key: "*fp32" for key in ("lse_ptr", "delta_ptr")} | {"scale": "fp32", "scale2": "fp32"}
    constants = {"G": 2, "GROUP": group, "R": 7, "D": dim, "WIDTH": dim, **constants, **more}
    built = aot.compile_kernel(
        jit,
        {key: kind for key, kind in types.items() if key in jit.arg_names},
        constants | {"ROWS": tile["ROWS"], "KEYS": tile["KEYS"]},
        warps=tile["num_warps"],
        stages=tile["num_stages"],
        capability=capability,
    )
    assert built.shared_bytes <= shared
    return built


@pytest.mark.corners
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize(
    ("dim", "group"), [(64, 7), pytest.param(128, 4, marks=pytest.mark.slow), (256, 2)], ids=str
)
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compile_for_hopper_without_spills(name, dim, group):
    """Tiles without a mask come by copies that run ahead; products of up to 128 columns are warp groups'."""
    built = compiled(name, dim, group)
    assert built.stack_bytes == 0 and built.registers <= 255
    inner = built.loop_of("LDGSTS")
    assert built.count("HGMMA", inner) > 0 or (dim > 128 and built.count("HMMA", inner) > 0)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_gradients_of_own_keys_compile_where_a_block_fills_no_tile(group):
    """Then the loop over whole tiles is empty; `ptxas` crashes on some such loops."""
    built = compiled("keys_kernel", 64, group, OWN=True)
    assert built.stack_bytes == 0 and built.registers <= 255


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.slow
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_fit_a_gpu_with_little_shared_memory(name, dim):
    """Compute capability 8.9 has 99 KB for a program."""
    compiled(name, dim, 2, capability=89, shared=99 * 1024)


def long_case(tokens, every, heads, rows, dim):
    """Blocks of two documents, of which the second begins in the middle of a tile."""
    gen = torch.Generator().manual_seed(0)
    anchors = torch.arange(0, tokens, every)
    anchors = (anchors + torch.randint(0, every, anchors.shape, generator=gen)).clamp(max=tokens).tolist()
    H, G = heads
    shapes = [(len(anchors), rows, H, dim), *[(len(anchors), rows, G, dim)] * 2, *[(tokens, G, dim)] * 2]
    tensors = [torch.randn(shape, generator=gen).cuda().bfloat16() for shape in shapes]
    return tensors, {"anchors": anchors, "bounds": (0, tokens // 3 + 5, tokens)}


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 255])
@pytest.mark.parametrize(
    ("heads", "rows", "dim"), [((14, 2), 7, 64), ((8, 2), 7, 128), ((4, 2), 37, 80), ((2, 2), 4, 256)]
)
def test_the_kernels_on_a_gpu(heads, rows, dim, window, monkeypatch):
    """bf16 beside fp64, and the same in each run.

    The reference implementation rounds inputs and results to bf16; the kernels also round the weights and
    their gradients, as flash attention does, which adds about as much.
    """
    tensors, case = long_case(1500, 8, heads, rows, dim)
    call = ours(window, dim**-0.5, **case)
    got, again = (with_gradients(call, tensors) for _ in range(2))
    exact = with_gradients(call, [x.double() for x in tensors])
    monkeypatch.setattr(anchored, "_kernels_serve", lambda *tensors: False)
    plain = with_gradients(call, tensors)
    found = [(out, *grads) for out, grads in (got, again, plain, exact)]
    for one, same, other, truth in zip(*found, strict=True):
        assert one.dtype == torch.bfloat16 and torch.equal(one, same)
        assert (one.double() - truth).norm() <= 2 * (other.double() - truth).norm()
