"""Attention of the nodes of one tree level over a ring of the last positions and the tree's nodes so far.

Formula, for node i of sequence b: softmax over the ring's positions p with since_b <= p and
len_b + ahead - W <= p < len_b, over the sinks p < min(F, len_b), and over the tree's nodes j that it sees, of
scale * q_i·k. Sink p lies in slot p, any other position p in slot F + (p - F) mod W, node j in slot
F + W + j; positions since_b .. len_b - 1, as far as they are W or fewer, are held.
Triton where `kernels.devices` says so, for head dims up to 128; plain torch, written here, elsewhere.
Shapes: B batch, T nodes of the level, N nodes so far, F sinks, W positions of the ring, S = F + W + room for
nodes, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longtrain.kernels.devices import kernels_serve, products_serve

_MAX_DIM = 128


def ring_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    bounds: tuple[Tensor, Tensor],
    sees_BTN: Tensor,
    *,
    window: int,
    ahead: int,
    scale: float,
    sinks: int = 0,
) -> Tensor:
    """Attention of a level's nodes, out_BHTD.

    Args:
        q_BHTD: rotated queries, any strides but 1 in the last dim.
        k_BGSD: keys of the ring and of the nodes behind it; what is not visible is finite.
        v_BGSD: values.
        bounds: since_B and len_B, int64, on the device.
        sees_BTN: bool; which of the tree's first N nodes each sees, itself among them.
        window: W.
        ahead: how far the level is from position len_b.
        scale: softmax scale, above 0.
        sinks: F, first positions of a sequence that are seen from everywhere.
    """
    fits = kernels_serve(q_BHTD) and k_BGSD.dtype == q_BHTD.dtype and q_BHTD.shape[-1] <= _MAX_DIM
    if fits and products_serve(q_BHTD, k_BGSD):
        from longtrain.kernels.ring_attention import kernel

        return kernel.ring_attention(
            q_BHTD, k_BGSD, v_BGSD, bounds, sees_BTN, window=window, ahead=ahead, scale=scale, sinks=sinks
        )
    B, H, T, D = q_BHTD.shape
    G, used = k_BGSD.shape[1], sinks + window + sees_BTN.shape[-1]
    since_B1, len_B1 = (bound[:, None] for bound in bounds)
    slot_W = torch.arange(window, device=len_B1.device)
    pos_BW = len_B1 - 1 - (len_B1 - 1 - sinks - slot_W) % window
    ring_BW = (pos_BW >= since_B1.clamp(min=sinks)) & (pos_BW >= len_B1 + ahead - window)
    seen = [ring_BW[:, None].expand(-1, T, -1), sees_BTN]
    if sinks:
        sink_BF = torch.arange(sinks, device=len_B1.device) < len_B1
        seen.insert(0, sink_BF[:, None].expand(-1, T, -1))
    seen_BTS = torch.cat(seen, dim=-1)
    # The query heads of a KV head become rows of one matrix, so keys are read once and never repeated.
    q_BGRD = q_BHTD.reshape(B, G, -1, D)
    seen_BGRS = seen_BTS[:, None, None].expand(-1, 1, H // G, -1, -1).reshape(B, 1, -1, used)
    k, v = k_BGSD[:, :, :used], v_BGSD[:, :, :used]
    out_BGRD = scaled_dot_product_attention(q_BGRD, k, v, attn_mask=seen_BGRS, scale=scale)
    return out_BGRD.reshape(B, H, T, D)
