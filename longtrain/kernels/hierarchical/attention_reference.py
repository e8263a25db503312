"""The torch twin of `kernels.hierarchical.attention`: the planes written out, the ring beside them, one mask.

Shapes: as there.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from longtrain.kernels.attention.reference import masked_attention
from longtrain.kernels.hierarchical.layout import BLOCK, RING, Lens, Planes, Ring
from longtrain.kernels.hierarchical.quantise_reference import dequantise
from longtrain.kernels.tree_attention.reference import Causal, visible_rows


def hier_attention(
    q_BHTD: Tensor,
    planes: Planes,
    ring: Ring,
    lens: Lens,
    mask: Tensor | Causal | None,
    *,
    bits: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `kernels.hierarchical.attention.hier_attention`.

    On a CPU only the blocks up to the longest sequence's are written out; elsewhere all, so that the host
    need not wait for the lengths.
    """
    T = q_BHTD.shape[2]
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    if q_BHTD.device.type == "cpu":
        planes = _first_blocks(planes, int(lens.blocks_B.max()))
    k, v = dequantise(planes, bits)
    visible_BTS = torch.cat((_in_planes(lens, k.shape[2], T), _in_ring(lens, mask, T)), 2)
    used_BS = visible_BTS.any(1)
    k_BGSD = torch.cat((k.to(wide), ring.k.to(wide)), 2).masked_fill(~used_BS[:, None, :, None], 0)
    v_BGSD = torch.cat((v.to(wide), ring.v.to(wide)), 2).masked_fill(~used_BS[:, None, :, None], 0)
    return masked_attention(q_BHTD, k_BGSD, v_BGSD, visible_BTS, scale=scale)


def _first_blocks(planes: Planes, blocks: int) -> Planes:
    """The first blocks of a layer's planes, as views."""
    names = [field.name for field in fields(planes) if field.name != "split"]
    return replace(planes, **{name: getattr(planes, name)[:, :, :blocks] for name in names})


def _in_planes(lens: Lens, rows: int, T: int) -> Tensor:
    """visible_BTS over the planes' positions: all that is quantised."""
    inside_BS = torch.arange(rows, device=lens.len_B.device) < lens.blocks_B[:, None] * BLOCK
    return inside_BS[:, None].expand(-1, T, -1)


def _in_ring(lens: Lens, mask: Tensor | Causal | None, T: int) -> Tensor:
    """visible_BTR over the ring's slots: what lies before the new rows, and of these what the mask says."""
    device = lens.len_B.device
    first_B1 = (lens.blocks_B * BLOCK)[:, None]
    position_BR = first_B1 + (torch.arange(RING, device=device) - first_B1) % RING
    own_BR = position_BR - lens.len_B[:, None]
    before_B1R = (own_BR < 0)[:, None]
    if mask is None:
        return before_B1R.expand(-1, T, -1)
    seen_BTT = visible_rows(mask, rows=T, batch=len(lens.len_B), device=device)
    index_BTR = own_BR.clamp(0, T - 1)[:, None].expand(-1, T, -1)
    inside_B1R = ((own_BR >= 0) & (own_BR < T))[:, None]
    return before_B1R | (inside_B1R & seen_BTT.gather(2, index_BTR))
