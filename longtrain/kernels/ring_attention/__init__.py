"""Attention of the nodes of one tree level over a ring of the last positions and the tree's nodes so far.

Formula, for node i of sequence b: softmax over the ring's positions p with since_b <= p and len_b + ahead - W
<= p < len_b, over the sinks p < min(F, len_b), and over the tree's nodes j that it sees, of scale * q_i·k.
Sink p is at buffer position p, any other position p at F + (p - F) mod W, node j at F + W + j; the buffer has
positions since_b .. len_b - 1, or the last W of them.

Triton if `kernels.devices` supports it, for head dims up to 128; else plain torch (in this file).

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
        q_BHTD: queries after RoPE, last dim contiguous.
        k_BGSD: keys of the ring and of the nodes behind it; finite where not visible.
        v_BGSD: values.
        bounds: since_B and len_B, int64, on the device.
        sees_BTN: bool mask of the tree's first N nodes that each node sees, itself included.
        window: W.
        ahead: distance of the level from position len_b.
        scale: softmax scale, above 0.
        sinks: F, number of first positions that every node sees.
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
    # pack the query heads of a KV head into one matrix, so that keys are read once and never repeated
    q_BGRD = q_BHTD.reshape(B, G, -1, D)
    seen_BGRS = seen_BTS[:, None, None].expand(-1, 1, H // G, -1, -1).reshape(B, 1, -1, used)
    k, v = k_BGSD[:, :, :used], v_BGSD[:, :, :used]
    out_BGRD = scaled_dot_product_attention(q_BGRD, k, v, attn_mask=seen_BGRS, scale=scale)
    return out_BGRD.reshape(B, H, T, D)
