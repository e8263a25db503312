"""Attention of a few queries over a long prefix that all of them see, and a short rest under a mask.

Formula: merge(flash(q, K[:prefix]), softmax(q·K[prefix:] + mask)) by their lse. Flash splits the prefix over
the whole GPU because it has no mask; a masked kernel would not.
Shapes: B batch, T queries, H query heads, G KV heads, R packed rows (T x H/G), S keys, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.attention.flash import flash_device


def split_serves(q_BGRD: Tensor) -> bool:
    """True if `split_attention` is faster: half precision on a GPU with flash attention."""
    half = q_BGRD.dtype in (torch.bfloat16, torch.float16)
    return half and flash_device(q_BGRD.device) and q_BGRD.shape[-1] % 8 == 0 and q_BGRD.shape[-1] <= 256


def split_attention(
    q_BGRD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, prefix: int, visible_B1RC: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over `k[:prefix]` without a mask and `k[prefix:]` under one.

    Args:
        q_BGRD: queries, the query heads of a KV head packed as rows.
        k_BGSD: keys.
        v_BGSD: values.
        prefix: number of keys that every query sees, 1 or more.
        visible_B1RC: bool mask of the C = S - prefix last keys; R may be 1 (for all queries).
        scale: softmax scale.

    Returns:
        out_BGRD in q's dtype, and the natural-log lse_BGR in fp32 (fp64 for fp64).

    Source: LongSpec §3.3 (hybrid tree attention).
    """
    op = torch.ops.aten._scaled_dot_product_flash_attention
    if q_BGRD.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    near, near_lse = op(q_BGRD, k_BGSD[:, :, :prefix], v_BGSD[:, :, :prefix], scale=scale)[:2]
    wide = torch.promote_types(q_BGRD.dtype, torch.float32)
    # the rest under its mask, [B, G, R, C]; then merged with the prefix by lse
    score_BGRC = (q_BGRD.to(wide) * scale) @ k_BGSD[:, :, prefix:].to(wide).transpose(2, 3)
    score_BGRC = score_BGRC.masked_fill(~visible_B1RC, -torch.inf)
    rest_lse = torch.logsumexp(score_BGRC, -1)
    weight = torch.exp(score_BGRC - rest_lse.masked_fill(rest_lse == -torch.inf, 0)[..., None])
    out, lse = lse_merge(near, near_lse, weight @ v_BGSD[:, :, prefix:].to(wide), rest_lse)
    return out.to(q_BGRD.dtype), lse


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
