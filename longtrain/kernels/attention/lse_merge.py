"""Merge of two partial attentions: o = o1 + σ(l2 - l1)(o2 - o1), in fp32.

Shapes: B batch, H heads, T queries, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lse_merge(
    out_1_BHTD: Tensor, lse_1_BHT: Tensor, out_2_BHTD: Tensor, lse_2_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key ranges, from the attention over each.

    Args:
        out_1_BHTD: output over the first range, any float dtype.
        lse_1_BHT: natural log of its softmax denominator, scores scaled; -inf where the range is empty.
        out_2_BHTD: as above, second range.
        lse_2_BHT: as above, second range.

    Returns:
        out_BHTD and lse_BHT in fp32 (fp64 for fp64). Where both ranges are empty: 0 and -inf.

    Source: LongSpec §3.3; the same merge as flash-decoding's.
    """
    wide = torch.promote_types(torch.promote_types(out_1_BHTD.dtype, out_2_BHTD.dtype), torch.float32)
    lse_1, lse_2 = lse_1_BHT.to(wide), lse_2_BHT.to(wide)
    none_1, none_2 = lse_1 == -torch.inf, lse_2 == -torch.inf
    share_2 = torch.sigmoid(lse_2 - lse_1)  # NaN only where both are empty
    share_2 = share_2.masked_fill(none_2, 0.0)
    share_1 = (1.0 - share_2).masked_fill(none_1, 0.0)
    out = out_1_BHTD.to(wide) * share_1[..., None] + out_2_BHTD.to(wide) * share_2[..., None]
    return out, torch.logaddexp(lse_1, lse_2)
