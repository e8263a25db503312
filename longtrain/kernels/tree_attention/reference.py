"""Reference implementation of `kernels.tree_attention`: one mask over all positions, in fp32 (fp64 for fp64).

Shapes: as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Causal:
    """Mask of a chain: new token i sees new tokens 0..i, and the whole prefix."""


CAUSAL = Causal()


def tree_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    len_B: Tensor,
    mask: Tensor | Causal | None,
    *,
    scale: float,
    base: int = 0,
    nodes: int | None = None,
    window: int = 0,
    depth_BT: Tensor | None = None,
    first_BG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.tree_attention.tree_attention`. Positions that no token sees may be undefined, even NaN.

    On a CPU only the positions up to the longest sequence are read; elsewhere all, so that the host need not
    wait for the lengths.
    """
    T, S = q_BHTD.shape[2], k_BGSD.shape[2]
    if k_BGSD.device.type == "cpu":
        S = min(S, base + int(len_B.max()) + (nodes or T))
    if first_BG is not None:  # each KV head becomes a sequence of one head, with its part of the buffer
        row_XS = first_BG.reshape(-1, 1) + torch.arange(S, device=len_B.device)
        row_XS = row_XS.clamp(max=k_BGSD.shape[2] - 1)
        k_X1SD, v_X1SD = (x_BGSD[0, 0][row_XS][:, None] for x_BGSD in (k_BGSD, v_BGSD))
        mask = mask.repeat_interleave(k_BGSD.shape[1], 0) if isinstance(mask, Tensor) else mask
        q_XhTD = q_BHTD.reshape(len(row_XS), -1, T, q_BHTD.shape[3])
        how: dict[str, Any] = {"scale": scale, "base": base, "nodes": nodes}
        out, lse = tree_attention(q_XhTD, k_X1SD, v_X1SD, len_B.flatten(), mask, **how)
        return out.view_as(q_BHTD), lse.view(q_BHTD.shape[:3])
    visible_BTS = visible_slots(len_B, mask, rows=T, slots=S, base=base, nodes=nodes)
    if window:
        visible_BTS = visible_BTS & within_window(len_B + base, depth_BT, window, rows=T, slots=S)
    used_BS = visible_BTS.any(1)
    v_BGSD = v_BGSD[:, :, :S].masked_fill(~used_BS[:, None, :, None], 0)
    return masked_attention(q_BHTD, k_BGSD[:, :, :S], v_BGSD, visible_BTS, scale=scale)


def visible_slots(
    len_B: Tensor,
    mask: Tensor | Causal | None,
    *,
    rows: int,
    slots: int,
    base: int,
    nodes: int | None = None,
) -> Tensor:
    """visible_BTS: mask of the first `slots` positions that each token sees."""
    device, nodes = len_B.device, rows if nodes is None else nodes
    own_BS = torch.arange(slots, device=device) - base - len_B[:, None]
    prefix_B1S = (own_BS < 0)[:, None]
    if mask is None:
        return prefix_B1S.expand(-1, rows, -1)
    seen_BTN = visible_rows(mask, rows=nodes, batch=len(len_B), device=device)
    index_BTS = own_BS.clamp(0, nodes - 1)[:, None].expand(-1, rows, -1)
    inside_B1S = ((own_BS >= 0) & (own_BS < nodes))[:, None]
    return prefix_B1S | (inside_B1S & seen_BTN.gather(2, index_BTS))


def within_window(first_B: Tensor, depth_BT: Tensor | None, window: int, *, rows: int, slots: int) -> Tensor:
    """within_BTS: mask of the positions less than `window` before each new token, by its depth.

    Args:
        first_B: cache position of the first new token.
        depth_BT: depth of each new token in its tree; None: those of a chain.
        window: keys that a token sees, its own included.
        rows: T.
        slots: S.
    """
    at_T = torch.arange(rows, device=first_B.device)
    depth_BT = at_T.expand(len(first_B), -1) if depth_BT is None else depth_BT
    own_BS = torch.arange(slots, device=first_B.device) - first_B[:, None]
    own_BS = torch.where(own_BS < 0, own_BS, depth_BT.gather(1, own_BS.clamp(0, rows - 1)))
    return own_BS[:, None] > depth_BT[:, :, None] - window


def visible_rows(mask: Tensor | Causal, *, rows: int, batch: int, device: torch.device) -> Tensor:
    """visible_BTN: mask of the N nodes that each new token sees; the inverse of `tree_bits`."""
    column = torch.arange(rows, device=device)
    if isinstance(mask, Causal):
        return (column <= column[:, None])[None].expand(batch, -1, -1)
    return (mask[:, :, column // 64] >> (column % 64) & 1).bool()


def masked_attention(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, visible_BTS: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention under an explicit mask, with natural-log lse; 0 and -inf for tokens that see nothing.

    Returns:
        out_BHTD in q's dtype, lse_BHT in fp32 (fp64 for fp64).
    """
    wide = torch.float64 if q_BHTD.dtype == torch.float64 else torch.float32
    B, H, T, D = q_BHTD.shape
    G = k_BGSD.shape[1]
    q_BGgTD = q_BHTD.to(wide).view(B, G, H // G, T, D)
    score = torch.einsum("bghtd,bgsd->bghts", q_BGgTD, k_BGSD.to(wide)) * scale
    score = score.masked_fill(~visible_BTS[:, None, None], -torch.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = torch.einsum("bghts,bgsd->bghtd", weight, v_BGSD.to(wide))
    return out.reshape(B, H, T, D).to(q_BHTD.dtype), lse.view(B, H, T)
