"""KL of a student's law to a teacher's, row by row of their logits, with its gradient and greedy agreement.

Formulas, p = softmax(teacher), q = softmax(student): kl = w * sum_v p_v (log p_v - log q_v), and its gradient
with respect to the student's logits, w * (q - p). In fp32 or wider inside.
Triton where `kernels.devices` says so: both rows are read twice and nothing else is written but the gradient.
Plain torch, written here, everywhere else.
Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from longtrain.kernels.devices import kernels_serve


def head_kl(
    student_RV: Tensor, teacher_RV: Tensor, weight_R: Tensor, *, gradient: bool
) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) of each row.

    Args:
        student_RV: logits; with `gradient` their gradient is written over them.
        teacher_RV: logits, in the same dtype.
        weight_R: factor on each row, in fp32 (fp64 for fp64).
        gradient: whether the gradient is wanted.

    Returns: kl_R, weighted, nats, in weight_R's dtype; bool_R, whether both have the same argmax.
    """
    if kernels_serve(student_RV) and kernels_serve(teacher_RV):
        from longtrain.kernels.head_kl import kernel

        return kernel.head_kl(student_RV, teacher_RV, weight_R, gradient=gradient)
    wide = torch.promote_types(student_RV.dtype, torch.float32)
    hit_R = student_RV.argmax(-1) == teacher_RV.argmax(-1)
    logq_RV = log_softmax(student_RV, dim=-1, dtype=wide)
    logp_RV = log_softmax(teacher_RV, dim=-1, dtype=wide)
    p_RV = logp_RV.exp()
    kl_R = torch.linalg.vecdot(p_RV, logp_RV.sub_(logq_RV)) * weight_R
    if gradient:
        student_RV.copy_(logq_RV.exp_().sub_(p_RV).mul_(weight_R[:, None]))
    return kl_R, hit_R
