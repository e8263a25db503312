"""Launches the Triton kernel of `kernels.hierarchical.quantise`.

Shapes: see there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.hierarchical.layout import BLOCK, Planes, Split
from longtrain.kernels.hierarchical.quantise_kernel import quantise_kernel

WARPS = {Split.FLOOR: 2, Split.RTN: 4}
"""Of a program. Fewer exchange less between threads; RTN's second rounding leaves no registers for that."""
CHANNELS = 64
"""Channels of a program that has keys; what it holds in registers grows with them."""


def quantise(
    k_LBGND: Tensor,
    v_LBGND: Tensor,
    planes: Planes,
    first_B: Tensor,
    count_B: Tensor,
    *,
    blocks: int,
    ring: int,
) -> None:
    """Programs for keys and values of each head and block; those beyond a sequence's count leave at once.

    Args:
        k_LBGND: rows of the source.
        v_LBGND: as `k_LBGND`.
        planes: of as many layers as the source; of one layer with or without L.
        first_B: block that a sequence's first 128 rows become, int64.
        count_B: blocks of each sequence, int64.
        blocks: largest count.
        ring: slots of the source if it is a ring, else 0.
    """
    L, B, G, _, D = k_LBGND.shape
    parts = D // CHANNELS
    with torch.cuda.device_of(k_LBGND):
        quantise_kernel[(blocks, L * B * G, 2 * parts)](
            k_LBGND, v_LBGND, planes.k_upper, planes.k_lower, planes.v_upper, planes.v_lower,
            planes.k_step, planes.k_zero, planes.v_step, planes.v_zero, first_B, count_B,
            *k_LBGND.stride()[:4], *v_LBGND.stride()[:4], B, G, planes.k_step.shape[-2],
            D=D, C=BLOCK, RING=ring, FLOOR=planes.split is Split.FLOOR, PARTS=parts,
            num_warps=WARPS[planes.split], num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
