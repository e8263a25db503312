"""Reference implementation of the hierarchical cache in plain torch: the specification and the CPU path.

Quantisation: steps and zeros are rounded to fp16 before codes are computed, so that codes compensate for that
rounding; all arithmetic is in fp32.

Attention: the planes are dequantised and concatenated with the ring under one mask.

Shapes: L layers, B batch, T new tokens, H query heads, G KV heads, N blocks, C = 128 tokens of a block, D
head dim, X = D / 2 bytes, R positions of the ring, S = N * C + R.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from longtrain.kernels.hierarchical.layout import BLOCK, BYTE_ORDER, RING, Lens, Planes, Ring, Split
from longtrain.kernels.tree_attention.reference import Causal, masked_attention, visible_rows

LEAST_STEP = 2.0**-14
"""Smallest step, that of a constant channel: the smallest normal fp16 number."""
LEVELS = {Split.FLOOR: 255 / 16, Split.RTN: 15.0}
"""Number of steps that cover the range of a group."""


def quantise(x: Tensor, dim: int, split: Split) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of groups that run along `dim`.

    Args:
        x: values, any float dtype.
        dim: negative; the dimension that shares a step and a zero.
        split: division of a code into two nibbles.

    Returns:
        upper and lower nibbles (uint8, the shape of `x`), steps and zeros (fp16, `dim` kept as 1).

    Source: QuantSpec §4.2 for `Split.RTN`.
    Note: `Split.FLOOR` is one 8-bit code cut in two. For the same bytes its INT8 error is at most half a code
        (the paper's residual cannot express +1/2 step and errs by a whole code there).
    """
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    # the zero rounds down and the step up, so that the codes still cover the whole range of the group
    zero = _down(low)
    step = _up((high - zero.float()) * (1.0 / LEVELS[split])).clamp(min=LEAST_STEP)
    z, s = zero.float(), step.float()
    per_step = 1.0 / s
    if split is Split.FLOOR:
        code = torch.round((x - z) * (per_step * 16)).clamp(0, 255)
        upper = torch.floor(code * 0.0625)
        lower = code - 16 * upper
    else:
        upper = torch.round((x - z) * per_step).clamp(0, 15)
        lower = torch.round((x - (z + s * upper)) * (per_step * 16)).clamp(-8, 7) + 8
    return upper.to(torch.uint8), lower.to(torch.uint8), step, zero


def quantise_blocks(k_BGND: Tensor, v_BGND: Tensor, planes: Planes, first_B: Tensor, count_B: Tensor) -> None:
    """Quantise blocks of 128 tokens into the planes of a layer, in place; reference for `quantise_kernel`.

    Args:
        k_BGND: keys, N a multiple of 128.
        v_BGND: values of the same tokens.
        planes: planes of one layer.
        first_B: index of the block for the first 128 tokens.
        count_B: number of blocks of each sequence to write.
    """
    B, G, rows, D = k_BGND.shape  # [B, G, N, D] -> [B, G, N / 128, 128, D]
    k, v = (x.reshape(B, G, rows // BLOCK, BLOCK, D) for x in (k_BGND, v_BGND))
    k_upper, k_lower, k_step, k_zero = quantise(k, -2, planes.split)
    v_upper, v_lower, v_step, v_zero = quantise(v, -1, planes.split)
    found = {
        "k_upper": pack_rows(k_upper),
        "k_lower": pack_rows(k_lower),
        "v_upper": pack_columns(v_upper),
        "v_lower": pack_columns(v_lower),
        "k_step": k_step[..., 0, :],
        "k_zero": k_zero[..., 0, :],
        "v_step": v_step[..., 0],
        "v_zero": v_zero[..., 0],
    }
    for b, (first, count) in enumerate(zip(first_B.tolist(), count_B.tolist(), strict=True)):
        for name, value in found.items():
            getattr(planes, name)[b, :, first : first + count] = value[b, :, :count]


def dequantise(planes: Planes, bits: int) -> tuple[Tensor, Tensor]:
    """K and V as [..., N * 128, D] in fp32, read at 4 bits (the upper plane alone) or 8 (both)."""
    upper_offset, lower_offset = planes.split.upper_offset, planes.split.lower_offset

    def read(upper: Tensor, lower: Tensor, step: Tensor, zero: Tensor) -> Tensor:
        if bits == 4:
            return (zero.float() + step.float() * (upper.float() + upper_offset)).flatten(-3, -2)
        code = 16 * upper.float() + (lower.float() - lower_offset)
        return (zero.float() + step.float() / 16 * code).flatten(-3, -2)

    k_upper, k_lower = unpack_rows(planes.k_upper), unpack_rows(planes.k_lower)
    v_upper, v_lower = unpack_columns(planes.v_upper), unpack_columns(planes.v_lower)
    k = read(k_upper, k_lower, planes.k_step.unsqueeze(-2), planes.k_zero.unsqueeze(-2))
    v = read(v_upper, v_lower, planes.v_step.unsqueeze(-1), planes.v_zero.unsqueeze(-1))
    return k, v


def pack_rows(code_CD: Tensor) -> Tensor:
    """Nibbles [..., C, D] as bytes [..., C, X] along dimensions."""
    low, high = code_CD.chunk(2, -1)
    return _swapped(low | (high << 4))


def unpack_rows(byte_CX: Tensor) -> Tensor:
    """The inverse of `pack_rows`."""
    byte_CX = _swapped(byte_CX)
    return torch.cat((byte_CX & 15, byte_CX >> 4), -1)


def pack_columns(code_CD: Tensor) -> Tensor:
    """Nibbles [..., C, D] as bytes [..., X, C] along tokens."""
    low, high = code_CD.chunk(2, -1)
    return _swapped((low | (high << 4)).transpose(-1, -2))


def unpack_columns(byte_XC: Tensor) -> Tensor:
    """The inverse of `pack_columns`."""
    byte_CX = _swapped(byte_XC).transpose(-1, -2)
    return torch.cat((byte_CX & 15, byte_CX >> 4), -1)


def _swapped(byte: Tensor) -> Tensor:
    """Swap the middle two of each aligned four bytes along the last dimension."""
    four = byte.unflatten(-1, (-1, 4))
    return four[..., list(BYTE_ORDER)].flatten(-2)


def _down(x: Tensor) -> Tensor:
    """The largest fp16 number that is not above x."""
    near = x.half()
    bits = near.view(torch.int16)
    below = (bits + torch.where(bits < 0, 1, -1).to(torch.int16)).view(torch.float16)
    return torch.where(near.float() > x, below, near)


def _up(x: Tensor) -> Tensor:
    """The smallest fp16 number that is not below x, x >= 0."""
    near = x.half()
    above = (near.view(torch.int16) + 1).view(torch.float16)
    return torch.where(near.float() < x, above, near)


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
    """See `kernels.hierarchical.hier_attention`.

    On a CPU only the blocks up to the longest sequence's are dequantised; elsewhere all, so that lengths need
    not be read back.
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
    """visible_BTS over the planes' positions: True for all quantised ones."""
    inside_BS = torch.arange(rows, device=lens.len_B.device) < lens.blocks_B[:, None] * BLOCK
    return inside_BS[:, None].expand(-1, T, -1)


def _in_ring(lens: Lens, mask: Tensor | Causal | None, T: int) -> Tensor:
    """visible_BTR over the ring: the entries before the new tokens, and new tokens by the mask."""
    device = lens.len_B.device
    first_B1 = (lens.blocks_B * BLOCK)[:, None]
    # the position at each index of the ring (position mod 384), and its distance from the first new token
    position_BR = first_B1 + (torch.arange(RING, device=device) - first_B1) % RING
    own_BR = position_BR - lens.len_B[:, None]
    before_B1R = (own_BR < 0)[:, None]
    if mask is None:
        return before_B1R.expand(-1, T, -1)
    seen_BTT = visible_rows(mask, rows=T, batch=len(lens.len_B), device=device)
    index_BTR = own_BR.clamp(0, T - 1)[:, None].expand(-1, T, -1)
    inside_B1R = ((own_BR >= 0) & (own_BR < T))[:, None]
    return before_B1R | (inside_B1R & seen_BTT.gather(2, index_BTR))
