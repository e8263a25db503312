"""Reference implementation of `kernels.top_entries` in plain torch. Shapes as there."""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN = 0x7FFFFFFF


def choose_entries(
    scores_BXS: Tensor, len_B: Tensor, out_BXK: Tensor, sinks: int, window: int, due_B: Tensor | None
) -> None:
    """See `kernels.top_entries.choose_entries`."""
    S, K = scores_BXS.shape[-1], out_BXK.shape[-1]
    slot_S = torch.arange(S, device=scores_BXS.device)
    forced_BS = (slot_S < sinks) | (slot_S >= len_B[:, None] - window)
    most = torch.finfo(torch.float32).max
    score = scores_BXS.float().nan_to_num(-most).clamp(-most, most) + 0.0  # of two zeros one
    score = score.masked_fill(forced_BS[:, None], torch.inf)
    score = score.masked_fill((slot_S >= len_B[:, None])[:, None], -torch.inf)
    bits = score.view(torch.int32)
    # floats as integers of the same order; the position in the lower half makes ties go to the later entry
    order = (bits ^ ((bits >> 31) & _SIGN)).long() << 32 | slot_S
    top_BXK = order.topk(min(K, S), -1).indices
    beyond_BXK = top_BXK >= len_B[:, None, None]
    found = top_BXK.masked_fill(beyond_BXK, S).sort(-1).values
    found = torch.nn.functional.pad(found.masked_fill(found == S, 0), (0, K - min(K, S)))
    out_BXK.copy_(found if due_B is None else torch.where(due_B[:, None, None], found, out_BXK))
