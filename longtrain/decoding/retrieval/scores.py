"""Scores of KV entries from queries and keys: attention weights by head, and their maximum over heads.

Shapes: ... leading dims (batch, sets of layers), H query heads, G KV heads, S cache positions, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.attention.sinks import with_sinks


def head_weights(
    q_HD: Tensor, k_GSD: Tensor, visible_S: Tensor, *, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """Attention weights of each query head over the visible entries.

    The softmax keeps the order of the entries of one head, but makes heads comparable.

    Args:
        q_HD: one query for each head, [..., H, D].
        k_GSD: keys, [..., G, S, D]; H is a multiple of G.
        visible_S: bool mask, [..., S], with at least one visible entry.
        scale: softmax scale.
        sinks_H: the target's attention sinks (`Target.sinks`), which join the softmax's denominator.

    Returns: w_HS in fp32 (fp64 for fp64), [..., H, S]; 0 where not visible.
    """
    H, G = q_HD.shape[-2], k_GSD.shape[-3]
    wide = torch.promote_types(q_HD.dtype, torch.float32)
    q = q_HD.to(wide).unflatten(-2, (G, H // G))  # [..., H, D] -> [..., G, H / G, D]
    score = (q @ k_GSD.to(wide).transpose(-1, -2)).flatten(-3, -2) * scale
    score = score.masked_fill(~visible_S[..., None, :], -torch.inf)
    if sinks_H is None:
        return score.softmax(-1)
    return with_sinks(score.softmax(-1)[..., None, :], score.logsumexp(-1, keepdim=True), sinks_H)[..., 0, :]


def group_scores(weights_HS: Tensor, groups: int) -> Tensor:
    """Scores of each KV head: the highest weight among its query heads, [..., H, S] to [..., G, S].

    MHA: as many groups as heads. GQA: fewer. MQA: one. MLA: one, since all heads read one latent entry.

    Source: SpeContext (arXiv 2512.00722) §4.3.
    Note: for MLA the paper chooses entries for each head and loads their union; the union's entries are those
        of this maximum at a larger budget.
    """
    H = weights_HS.shape[-2]
    return weights_HS.unflatten(-2, (groups, H // groups)).amax(-2)
