"""KL divergence of a student's distribution from a teacher's, with gradient and agreement of both.

Formulas, p = softmax(teacher), q = softmax(student): kl = w * sum_v p_v (log p_v - log q_v), and its gradient
with respect to the student's logits, w * (q - p). In fp32 or wider inside.

Triton if `kernels.devices` supports it: the logits are read twice and nothing else is written but the
gradient. Else plain torch (in this file).

Shapes: R positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from longtrain.kernels.devices import kernels_serve


def head_kl(
    student_RV: Tensor, teacher_RV: Tensor, weight_R: Tensor, *, gradient: bool
) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) at each position.

    Args:
        student_RV: logits; with `gradient` overwritten by their gradient.
        teacher_RV: logits, in the same dtype.
        weight_R: factor on each position, in fp32 (fp64 for fp64).
        gradient: True to compute the gradient.

    Returns:
        kl_R, weighted, nats, in weight_R's dtype; bool_R, True if both have the same argmax.
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
