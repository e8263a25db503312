"""Own keys merged with attention that is done: the kernels compiled for Hopper, and on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from longtrain.kernels.own_keys import OwnKeys, merge, merge_backward, reference


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_the_kernels_compile_for_hopper_without_spills(dim):
    import aot

    from longtrain.kernels.own_keys import kernel as own_keys_kernel

    halves = ["q", "out", "k", "v", "new_out", "grad", "dq", "new_dq", "dk", "dv"]
    types = {f"{name}_ptr": "*bf16" for name in halves}
    types |= {"lse_ptr": "*fp32", "new_lse_ptr": "*fp32", "seen_ptr": "*u8", "scale": "fp32"}
    constants = {"D": dim, "WIDTH": dim, "TILE": 2048 // dim, "MASKED": True}
    strides = ["q_t", "q_h", "out_t", "out_h", "grad_t", "grad_h", "dq_t", "dq_h"]
    for name in ("_merge_kernel", "_queries_kernel", "_keys_kernel"):
        jit = getattr(own_keys_kernel, name)
        mine = {key: kind for key, kind in types.items() if key in jit.arg_names}
        aligned = [key for key in strides if key in jit.arg_names]
        built = aot.compile_kernel(jit, mine, constants, aligned=aligned, warps=4)
        assert built.stack_bytes == 0 and built.registers <= 168


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("T", "H", "G", "D", "M"), [(5000, 9, 3, 64, 4), (3001, 32, 8, 128, 6)])
def test_the_kernels_on_a_gpu(T, H, G, D, M, masked):
    """In bf16 beside the reference implementation in fp32."""
    gen = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, device="cuda").bfloat16()

    seen = torch.rand(M, T, generator=gen, device="cuda") < 0.6 if masked else None
    own = OwnKeys(draw(M, T, G, D), draw(M, T, G, D), seen)
    wide = OwnKeys(own.k_MTGD.float(), own.v_MTGD.float(), seen)
    q, out, grad, dq = (draw(T, H, D) for _ in range(4))
    lse = torch.randn(H, T, generator=gen, device="cuda").t()
    got = merge(q, out, lse, own, scale=D**-0.5)
    expected = reference.merge(q.float(), out.float(), lse, wide, scale=D**-0.5)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.float(), other, rtol=2e-2, atol=2e-2)
    got = merge_backward(grad, q, *got, own, dq, scale=D**-0.5)
    expected = reference.merge_backward(grad.float(), q.float(), *expected, wide, dq.float(), scale=D**-0.5)
    for mine, other in zip(got, expected, strict=True):
        assert (mine.float() - other).norm() < 1e-2 * other.norm()
