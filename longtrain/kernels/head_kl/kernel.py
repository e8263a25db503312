"""The Triton kernel of `kernels.head_kl`, and its launch.

Shapes: as in `kernels.head_kl`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtrain.kernels.devices import launched_on

_COLUMNS = 4096
"""Most logits that a program reads at once."""
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _kl_kernel(
    student_ptr, teacher_ptr, weight_ptr, kl_ptr, hit_ptr, student_r, teacher_r, V,
    COLUMNS: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """One position: both denominators, the divergence and both argmaxes, then the gradient."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_r
    teacher_ptr += row * teacher_r
    weight = tl.load(weight_ptr + row)
    column = tl.arange(0, COLUMNS)
    top_s, top_t = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    sum_s, sum_t, cross = tl.zeros((), tl.float32), tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    best_s, best_t = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in range(0, V, COLUMNS):
        at = first + column
        inside = at < V
        s = tl.load(student_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        here_s, here_t = tl.max(s, 0), tl.max(t, 0)
        best_s = tl.where(here_s > top_s, tl.min(tl.where(s == here_s, at, _NONE), 0), best_s)
        best_t = tl.where(here_t > top_t, tl.min(tl.where(t == here_t, at, _NONE), 0), best_t)
        new_s, new_t = tl.maximum(top_s, here_s), tl.maximum(top_t, here_t)
        law_t = tl.exp(t - new_t)
        less_t = tl.exp(top_t - new_t)
        sum_s = sum_s * tl.exp(top_s - new_s) + tl.sum(tl.exp(s - new_s), 0)
        sum_t = sum_t * less_t + tl.sum(law_t, 0)
        cross = cross * less_t + tl.sum(tl.where(inside, law_t * (t - s), 0.0), 0)
        top_s, top_t = new_s, new_t
    lse_s, lse_t = top_s + tl.log(sum_s), top_t + tl.log(sum_t)
    tl.store(kl_ptr + row, weight * (cross / sum_t - lse_t + lse_s))
    tl.store(hit_ptr + row, (best_s == best_t).to(tl.int8))
    if GRADIENT:
        for first in range(0, V, COLUMNS):
            at = first + column
            inside = at < V
            s = tl.load(student_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
            t = tl.load(teacher_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
            slope = weight * (tl.exp(s - lse_s) - tl.exp(t - lse_t))
            tl.store(student_ptr + at, slope.to(student_ptr.dtype.element_ty), mask=inside)


def head_kl(
    student_RV: Tensor, teacher_RV: Tensor, weight_R: Tensor, *, gradient: bool
) -> tuple[Tensor, Tensor]:
    """See `kernels.head_kl.head_kl`."""
    R, V = student_RV.shape
    kl_R = weight_R.new_empty(R, dtype=torch.float32)
    hit_R = torch.empty(R, dtype=torch.int8, device=student_RV.device)
    columns = min(_COLUMNS, triton.next_power_of_2(V))
    if R:
        with launched_on(student_RV):
            _kl_kernel[(R,)](
                student_RV, teacher_RV, weight_R.float().contiguous(), kl_R, hit_R,
                student_RV.stride(0), teacher_RV.stride(0), V,
                COLUMNS=columns, GRADIENT=gradient, num_warps=max(1, min(8, columns // 512)),
            )  # fmt: skip
    return kl_R, hit_R.bool()
