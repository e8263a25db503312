"""QuantSpec's hierarchical INT4/INT8 KV cache: quantising blocks of 128 tokens, and attention over them.

Quantising: a step and a zero for each key channel of a block and for each value token; 8-bit codes whose
halves go to planes of their own (`layout`). Triton on a GPU of compute capability 8.0 or more (interpreted
under TRITON_INTERPRET=1 on any device), `reference` everywhere else; both give the same bytes.

Attention, for query i of sequence b: softmax of scale * q_i·k_p over the positions p < 128 * blocks_b of the
planes, the ring's positions p < len_b, and the new tokens len_b + j that it sees. Quantised blocks are read
at 4 or 8 bits; codes are unpacked in registers, and dequantised blocks are never written to memory. Lengths
are read on the device, so one CUDA graph serves every length. Triton on CUDA; elsewhere `reference`, which
dequantises whole planes.

Shapes: L layers, B batch, T new tokens, N source tokens, H query heads, G KV heads (H a multiple of G), D
head dim, W 64-bit words of a token's mask; planes and ring as in `layout`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import kernels_serve, products_serve
from longtrain.kernels.hierarchical import reference
from longtrain.kernels.hierarchical.layout import BLOCK, HEAD_DIMS, RING, Lens, Planes, Ring
from longtrain.kernels.hierarchical.reference import LEVELS
from longtrain.kernels.tree_attention import check_mask
from longtrain.kernels.tree_attention.reference import Causal

MAX_ROWS = BLOCK
"""Most new tokens of a step: the ring's third block has room for them."""
LARGEST = 6e4
"""Largest magnitude that is quantised: its dequantised value still fits into fp16."""
_ROUNDED_UP = 1 + 2**-10
"""How much wider than its range a step may make a group: fp16 has 10 bits after the first."""


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
    """Attention of T new tokens over a layer's planes and ring.

    Args:
        q_BHTD: queries, rotated.
        planes: planes of one layer. They and `lens.blocks_B` are read before the preceding kernel has ended,
            so the operator right before must not write them (`kernels.devices`).
        ring: ring of one layer, with the new tokens at positions len_B[b]...
        lens: lengths of the sequences.
        mask: bits_BTW of `tree_attention.tree_bits`; `CAUSAL`: token i sees new tokens 0..i; None: tokens see
            the entries before `len_B` only.
        bits: 4 reads the upper plane, 8 both.
        scale: softmax scale, above 0.

    Returns:
        out_BHTD in q's dtype and the natural-log lse_BHT in fp32 (fp64 for fp64); 0 and -inf for a token
        that sees nothing.

    Raises:
        DataError: shapes, a mask or bits that do not fit.

    Source: QuantSpec §4.2-4.3.
    """
    B, H, T, D = q_BHTD.shape
    batch, G, _, width = ring.k.shape
    if width != D or H % G or batch != B or not 1 <= T <= MAX_ROWS:
        raise refusal(
            DataError,
            f"queries {tuple(q_BHTD.shape)} over a ring {tuple(ring.k.shape)}",
            f"one batch, one head dim, 1 to {MAX_ROWS} tokens, query heads a multiple of KV heads",
        )
    if bits not in (4, 8):
        raise refusal(DataError, f"bits={bits}", "4, 8")
    check_mask(mask, B, T)
    if not kernel_serves(q_BHTD, planes, ring):
        return reference.hier_attention(q_BHTD, planes, ring, lens, mask, bits=bits, scale=scale)
    from longtrain.kernels.hierarchical import attention_launch

    return attention_launch.hier_attention(q_BHTD, planes, ring, lens, mask, bits, scale)


def kernel_serves(q_BHTD: Tensor, planes: Planes, ring: Ring) -> bool:
    """True if the Triton kernels support these tensors; else the reference implementation is used."""
    held = all(x.is_contiguous() for x in (ring.k, ring.v, planes.k_upper, planes.v_upper))
    return products_serve(q_BHTD, ring.k) and held and q_BHTD.shape[-1] in HEAD_DIMS


def quantise_blocks(k_BGND: Tensor, v_BGND: Tensor, planes: Planes, count_B: Tensor) -> None:
    """Quantise the first `count_B` blocks of each sequence, 128 tokens each, into a layer's planes.

    Args:
        k_BGND: keys, after RoPE; last dim contiguous; N at least 128 times the largest count.
        v_BGND: values, likewise.
        planes: the planes of one layer; written in place.
        count_B: number of blocks of each sequence, int64 on the device.

    Raises:
        DataError: shapes that do not fit the planes.
    """
    blocks = min(k_BGND.shape[2] // BLOCK, planes.k_step.shape[2])
    _check(k_BGND, v_BGND, planes)
    if blocks == 0:
        return
    k, v = k_BGND[:, :, : blocks * BLOCK], v_BGND[:, :, : blocks * BLOCK]
    first_B = torch.zeros_like(count_B)
    if kernels_serve(k_BGND):
        _kernel()(k[None], v[None], planes, first_B, count_B, blocks=blocks, ring=0)
    else:
        reference.quantise_blocks(k, v, planes, first_B, count_B)


def flush_blocks(ring: Ring, planes: Planes, block_B: Tensor, due_B: Tensor) -> None:
    """Quantise the ring's block with index `block_B[b]` into the planes of all layers, if `due_B[b]`.

    Args:
        ring: ring of all layers.
        planes: planes of all layers; written in place.
        block_B: index of the oldest block in the ring, int64 on the device.
        due_B: bool mask of the sequences whose block is quantised.
    """
    count_B = due_B.to(torch.int64)
    if kernels_serve(ring.k):
        _kernel()(ring.k, ring.v, planes, block_B, count_B, blocks=1, ring=RING)
        return
    slot_BC = (block_B[:, None] * BLOCK + torch.arange(BLOCK, device=block_B.device)) % RING
    row_B1 = torch.arange(len(block_B), device=block_B.device)[:, None]
    for layer in range(len(ring.k)):
        k, v = (x[layer][row_B1, :, slot_BC].transpose(1, 2) for x in (ring.k, ring.v))
        reference.quantise_blocks(k, v, planes.layer(layer), block_B, count_B)


def unsound(planes: Planes, ring: Ring, lens: Lens) -> Tensor:
    """Find keys or values of prompts just read that cannot be quantised: NaN, infinite or too large.

    Of quantised groups only step and zero are checked: the zero is the lowest value, and with the step it
    gives the highest in fp16 precision. So numbers up to 0.25 % above `LARGEST` may pass, and none up to
    `LARGEST` is refused. Entries in the ring are checked directly. Nothing is read back to the host.

    Args:
        planes: the planes of all layers.
        ring: the ring of all layers.
        lens: lengths of the sequences.

    Returns:
        bool [L, 2]: True for a layer's keys or values with such numbers.
    """
    first_B1 = (lens.blocks_B * BLOCK)[:, None]
    slot_R = torch.arange(RING, device=first_B1.device)
    held_BR = first_B1 + (slot_R - first_B1) % RING < lens.len_B[:, None]
    filled_BN = torch.arange(planes.k_step.shape[-2], device=first_B1.device) < lens.blocks_B[:, None]
    steps = LEVELS[planes.split] / _ROUNDED_UP
    found = []
    for rows, step, zero in (
        (ring.k, planes.k_step, planes.k_zero),
        (ring.v, planes.v_step, planes.v_zero),
    ):
        low, high = torch.aminmax(rows, dim=-1)
        recent = ~((low >= -LARGEST) & (high <= LARGEST)) & held_BR[:, None]
        lowest, highest = zero.amin(-1), torch.add(zero, step, alpha=steps).amax(-1)
        old = ~((lowest >= -LARGEST) & (highest <= LARGEST)) & filled_BN[:, None]
        found.append(recent.flatten(1).any(1) | old.flatten(1).any(1))
    return torch.stack(found, 1)


def _kernel() -> Any:
    """The Triton kernel's launch; triton is imported where it runs."""
    from longtrain.kernels.hierarchical.quantise_kernel import quantise

    return quantise


def _check(k_BGND: Tensor, v_BGND: Tensor, planes: Planes) -> None:
    B, G, _, D = k_BGND.shape
    held = tuple(planes.k_step.shape)
    if v_BGND.shape != k_BGND.shape or held[:2] != (B, G) or held[-1] != D:
        raise refusal(
            DataError,
            f"keys {tuple(k_BGND.shape)} and values {tuple(v_BGND.shape)} for planes of [sequences, KV "
            f"heads, blocks, head dim] = {list(held)}",
            "the same sequences, heads and head dim",
        )
