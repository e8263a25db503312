"""Attention over a hierarchical KV cache: quantised blocks at 4 or 8 bits, then recent tokens in the ring.

Formula, for query i of sequence b: softmax of scale * q_i·k_p over the positions p < 128 * blocks_b of the
planes, the ring's positions p < len_b, and the new tokens len_b + j that it sees.

Codes are unpacked in registers, and dequantised blocks are never written to memory. Lengths are read on the
device, so one CUDA graph serves every length. Triton on CUDA; elsewhere the reference implementation, which
dequantises whole planes.

Shapes: B batch, T new tokens, H query heads, G KV heads (H a multiple of G), D head dim, W 64-bit words of a
token's mask; planes and ring as in `kernels.hierarchical.layout`.
"""

from __future__ import annotations

from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import products_serve
from longtrain.kernels.hierarchical import reference
from longtrain.kernels.hierarchical.layout import BLOCK, HEAD_DIMS, Lens, Planes, Ring
from longtrain.kernels.tree_attention import check_mask
from longtrain.kernels.tree_attention.reference import Causal

MAX_ROWS = BLOCK
"""Most new tokens of a step: the ring's third block has room for them."""


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
