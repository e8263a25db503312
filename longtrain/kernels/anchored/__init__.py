"""Attention of blocks of tokens: each block sees the keys before its anchor, and all keys of its own.

Formula, for every row of block n: one softmax over scale * q·k_c for the keys c of its document with
max(start_n, anchor_n - window) <= c < anchor_n, and over scale * q·o_j for all rows j of the block. Blocks do
not see each other. Drafts that predict a block in one pass (DFlash, DSpark) are trained with it.

Triton in half precision on a GPU of compute capability 8.0 or more, for head dims up to 256 (interpreted
under TRITON_INTERPRET=1 on any device, also in fp32, but not in bf16, which the interpreter cannot multiply);
`reference`, plain torch, everywhere else. Products run in the tensors' dtype, and weights and their gradients
are rounded to it; sums are fp32 or wider, and in the kernels of the same order in each run.

Shapes: N blocks, R rows of a block, S keys, H query heads, G KV heads (H a multiple of G), D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.anchored import reference
from longtrain.kernels.devices import interpreted, products_serve

_MOST_DIM = 256
"""Largest head dim of the Triton kernels."""


def anchored_attention(
    q_NRHD: Tensor,
    own: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    starts: Tensor,
    anchors: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of blocks over the keys before their anchors and their own; differentiable in all tensors.

    Args:
        q_NRHD: queries, after RoPE.
        own: keys and values of the blocks' own rows, each [N, R, G, D].
        keys: keys and values that blocks share, each [S, G, D].
        starts: the first shared key of each block's document; int64 [N], ascending, on the host.
        anchors: one past the last shared key that each block sees; likewise.
        scale: softmax scale, above 0.
        window: number of keys before the anchor that a block sees; None: all of its document.

    Returns:
        out_NRHD in q's dtype.

    Raises:
        DataError: bounds that decrease, anchors before their document's start or beyond the keys.
    """
    bounds, most = torch.stack((starts, anchors)) if len(starts) == len(anchors) else None, len(keys[0])
    if bounds is None or bounds.shape[1] != len(q_NRHD) or not _ascend(bounds, most):
        raise refusal(
            DataError,
            f"attention of {len(q_NRHD)} blocks at anchors {tuple(anchors[:8].tolist())} over {most} keys",
            "ascending anchors, one for each block, between the start of its document and the last key",
        )
    low_N = starts if window is None else torch.maximum(starts, anchors - window)
    if _kernels_serve(q_NRHD, *own, *keys):
        from longtrain.kernels.anchored import launch

        return launch.Anchored.apply(q_NRHD, *own, *keys, low_N, anchors, scale)
    return reference.anchored(q_NRHD, own, keys, low_N, anchors, scale=scale)


def _ascend(bounds_2N: Tensor, most: int) -> bool:
    """True if starts and anchors ascend, and each anchor is from its start to `most`."""
    start_N, anchor_N = bounds_2N
    inside = (start_N >= 0) & (start_N <= anchor_N) & (anchor_N <= most)
    return bool(inside.all() and (bounds_2N.diff() >= 0).all())


def _kernels_serve(q_NRHD: Tensor, *others: Tensor) -> bool:
    same = all(x.dtype == q_NRHD.dtype for x in others)
    narrow = q_NRHD.dtype in (torch.bfloat16, torch.float16) or interpreted()
    return same and narrow and q_NRHD.shape[-1] <= _MOST_DIM and products_serve(q_NRHD, q_NRHD)
