"""Launches of the Triton kernels of `kernels.draft_loss`.

Shapes: as there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from longtrain.kernels.devices import launched_on
from longtrain.kernels.draft_loss import kernel

if TYPE_CHECKING:
    from longtrain.kernels.draft_loss import DraftPairs, TeacherLogits

_COLUMNS = 2048
"""Most logits that a program reads at once."""
_OBJECTIVES = {
    "kl": kernel.KL,
    "lk": kernel.LK,
    "tv": kernel.TV,
    "lk_hybrid": kernel.LK_HYBRID,
    "ce_tv": kernel.CE_TV,
}


def teacher_of(logit_BV: Tensor, draft_ids_K: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.draft_loss.teacher_of`."""
    B, V = logit_BV.shape
    K = V if draft_ids_K is None else len(draft_ids_K)
    logit_BK = logit_BV.contiguous() if draft_ids_K is None else logit_BV.new_empty(B, K)
    sum_2B = torch.empty(2, B, dtype=torch.float32, device=logit_BV.device)
    best_B = torch.empty(B, dtype=torch.int64, device=logit_BV.device)
    if B:
        with launched_on(logit_BV):
            kernel._teacher_kernel[(B,)](
                logit_BV, draft_ids_K, logit_BK, sum_2B[0], sum_2B[1], best_B, logit_BV.stride(0), V, K,
                IDS=draft_ids_K is not None, **_blocks(V),
            )  # fmt: skip
    return logit_BK, sum_2B[0], sum_2B[0 if draft_ids_K is None else 1], best_B


def draft_passes(
    logit_JBK: Tensor,
    teacher: TeacherLogits,
    draft_ids_K: Tensor | None,
    pairs: DraftPairs,
    *,
    objective: str,
    factor: float,
    gradient: bool,
) -> None:
    """See `kernels.draft_loss.draft_passes` and `reference.draft_passes`."""
    J, B, K = logit_JBK.shape
    if not J * B:
        return
    with launched_on(logit_JBK):
        kernel._passes_kernel[(J * B,)](
            logit_JBK, *teacher, draft_ids_K, *pairs[:3], pairs.hit_JB.view(torch.int8), *pairs[4:],
            factor, pairs.row_JB.stride(0), J, B, K,
            OBJECTIVE=_OBJECTIVES[objective], GRADIENT=gradient, IDS=draft_ids_K is not None, **_blocks(K),
        )  # fmt: skip


def _blocks(width: int) -> dict[str, Any]:
    """Columns of a block and warps of a program, for this many logits."""
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    return {"COLUMNS": columns, "num_warps": max(1, min(8, columns // 256))}
