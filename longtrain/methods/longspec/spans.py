"""Cross-attention of a chunk's rows to the target's keys: rows as they were written behind what a cache kept.

Shapes: Q rows, S rows of the packed row, K kept rows of a head, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from longtrain.kernels.attention.packed import packed_attention

if TYPE_CHECKING:
    from longtrain.methods.longspec.indices import Chunk

Kept: TypeAlias = Mapping[int, list[tuple[Tensor, Tensor]]]
"""Document -> k_KD and v_KD of each KV head (`KVCache.old_rows`)."""


def span_attention(
    q_QHD: Tensor, kv_SGD: tuple[Tensor, Tensor], kept: Kept, chunk: Chunk, *, scale: float
) -> Tensor:
    """What a chunk's queries gather from the target's keys and values, [Q, H, D].

    Where a cache kept as many rows for every KV head, all heads are read at once, otherwise one by one.

    Args:
        q_QHD: queries, after RoPE.
        kv_SGD: the target's K (post-RoPE) and V of the packed row, as they were written.
        kept: old rows of documents in a view.
        chunk: which keys each row sees.
        scale: softmax scale.
    """
    kv_SGD = (kv_SGD[0].to(q_QHD.dtype), kv_SGD[1].to(q_QHD.dtype))
    counts = [{len(k_KD) for k_KD, _ in heads} for heads in kept.values()]
    if all(len(found) == 1 for found in counts):
        return _attention(q_QHD, kv_SGD, kept, chunk, scale)
    G = kv_SGD[0].shape[1]
    return torch.cat(
        [
            _attention(
                q_QgD,
                (kv_SGD[0][:, g : g + 1], kv_SGD[1][:, g : g + 1]),
                {d: heads[g : g + 1] for d, heads in kept.items()},
                chunk,
                scale,
            )
            for g, q_QgD in enumerate(q_QHD.chunk(G, 1))
        ],
        1,
    )


def _attention(
    q_QHD: Tensor, kv_SGD: tuple[Tensor, Tensor], kept: Kept, chunk: Chunk, scale: float
) -> Tensor:
    """The same where all heads have as many kept rows."""
    bounds, parts = [0], []
    for span in chunk.spans:
        heads = kept[span.document] if span.old else []
        old = min(span.old, len(heads[0][0])) if heads else 0
        if old:
            parts.append([torch.stack([head[i][:old] for head in heads], 1).to(q_QHD) for i in (0, 1)])
        parts.append([part_SGD[span.start : span.stop] for part_SGD in kv_SGD])
        bounds.append(bounds[-1] + old + span.stop - span.start)
    k_XGD, v_XGD = (some[0] if len(some) == 1 else torch.cat(some) for some in zip(*parts, strict=True))
    return packed_attention(q_QHD, k_XGD, v_XGD, chunk.cross_q, bounds, scale=scale)
