"""Attention over a hierarchical KV cache: quantised blocks at 4 or 8 bits, then the ring's recent rows.

Formula, for query row i of sequence b: softmax over the positions p < 128 * blocks_b of the planes, the
ring's positions p < len_b, and the ring's new rows len_b + j that it sees, of scale * q_i·k_p.
Codes are unpacked inside of the kernel and go into its products; nothing of the planes is ever written out.
Nothing of the lengths is known to the host, so that one CUDA graph serves every length. Triton where
`kernels.tree_attention` uses it; `hier_attention_reference`, which writes the planes out, everywhere else.
Shapes: B batch, T new rows, H query heads, G KV heads (H a multiple of G), D head dim, W 64-bit words of a
row's mask; planes and ring as in `kernels.hierarchical.layout`.
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
"""Most new rows: the ring's third block holds them."""


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
    """Attention of T rows over a layer's planes and ring.

    Args:
        q_BHTD: queries, rotated.
        planes: the planes of one layer. They and `lens.blocks_B` are read before the kernel in front has
            ended: the operator right before must not write them (`kernels.devices`).
        ring: the ring of one layer; it holds the new rows at positions len_B[b]...
        lens: how far each sequence has come.
        mask: bits_BTW of `tree_attention.tree_bits`; `CAUSAL`: row i sees rows 0..i; None: rows see what lies
            before them alone.
        bits: 4 reads the upper plane alone, 8 both.
        scale: softmax scale, above 0.

    Returns:
        out_BHTD in q's dtype and the natural-log lse_BHT in fp32 (fp64 for fp64); 0 and -inf for a row that
        sees nothing.

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
            f"one batch, one head dim, 1 to {MAX_ROWS} rows, query heads a multiple of KV heads",
        )
    if bits not in (4, 8):
        raise refusal(DataError, f"bits={bits}", "4, 8")
    check_mask(mask, B, T)
    if not kernel_serves(q_BHTD, planes, ring):
        return reference.hier_attention(q_BHTD, planes, ring, lens, mask, bits=bits, scale=scale)
    from longtrain.kernels.hierarchical import attention_launch

    return attention_launch.hier_attention(q_BHTD, planes, ring, lens, mask, bits, scale)


def kernel_serves(q_BHTD: Tensor, planes: Planes, ring: Ring) -> bool:
    """Whether the Triton kernel takes these tensors; the reference does otherwise."""
    held = all(x.is_contiguous() for x in (ring.k, ring.v, planes.k_upper, planes.v_upper))
    return products_serve(q_BHTD, ring.k) and held and q_BHTD.shape[-1] in HEAD_DIMS
