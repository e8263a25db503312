"""KL of laws by their logits: the kernel compiled for compute capability 9.0, and run on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs triton")

from longtrain.losses import fused_linear_kl


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
def test_the_kernel_compiles_for_hopper_without_spills():
    import aot

    from longtrain.kernels.head_kl import kernel as head_kl_triton

    jit = getattr(head_kl_triton, "_kl_kernel")  # noqa: B009 (the name is what the check of all kernels looks for)
    types = {"student_ptr": "*bf16", "teacher_ptr": "*bf16", "weight_ptr": "*fp32", "kl_ptr": "*fp32"}
    types |= {"hit_ptr": "*i8"}
    constants = {"COLUMNS": 4096, "GRADIENT": True}
    built = aot.compile_kernel(jit, types, constants, aligned=["student_r", "teacher_r", "V"], warps=8)
    assert built.stack_bytes == 0 and built.registers <= 168


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(300, 8192), (70, 128256)])
def test_loss_and_gradient_on_a_gpu(rows, vocab):
    """In bf16 beside fp64 from the same rounded operands."""
    torch.manual_seed(0)
    head = (torch.randn(vocab, 64) * 0.2).bfloat16()
    hidden, teacher = torch.randn(2, rows, 64).bfloat16()
    weights = torch.rand(rows)
    found = []
    for move in (lambda x: x.cuda(), lambda x: x.double()):
        mine = move(hidden).requires_grad_()
        loss = fused_linear_kl(mine, move(teacher), move(head), weights_T=move(weights))
        loss.total.backward()
        found.append((loss.total.detach().double().cpu(), mine.grad.double().cpu(), loss.hit_T.cpu()))
    (total, grad, hits), (expected, slope, agreed) = found
    torch.testing.assert_close(total, expected, rtol=5e-3, atol=1e-3)
    assert (grad - slope).norm() / slope.norm() < 0.02
    assert (hits != agreed).float().mean() < 0.02  # logits in bf16 are often equal
