"""Sums of whole numbers over blocks of a vocabulary: the first half of an exact draw (`sampling.HashRng`).

Weights are counted in units, whose sums are exact in any order. In plain torch the counts of a whole
vocabulary are written and read again, eight bytes each; the kernel reads the weights once, and writes only
the sums.

One Triton kernel if `kernels.devices` supports it, else plain torch (in this file); both give the same
numbers.

Shapes: B batch, V vocabulary, K blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.devices import kernels_serve

BLOCK = 512
"""Tokens of a block."""


def counts(weight: Tensor, unit: Tensor) -> Tensor:
    """Weights as multiples of a unit, rounded down, int64.

    Args:
        weight: 0 or more, [..., V].
        unit: above 0, fp64 [..., 1].
    """
    return (weight / unit).long()


def block_sums(weight_BV: Tensor, unit_B1: Tensor) -> Tensor:
    """Sums of `counts` over blocks of `BLOCK` tokens.

    Args:
        weight_BV: 0 or more, any float dtype.
        unit_B1: above 0, fp64.

    Returns:
        int64 of shape [B, V // BLOCK + 1]; the last block has the tokens that are left, perhaps none.
    """
    if kernels_serve(weight_BV):
        from longtrain.kernels.block_sums import kernel

        return kernel.block_sums(weight_BV, unit_B1, BLOCK)
    count_BV = counts(weight_BV, unit_B1)
    whole = count_BV.shape[-1] // BLOCK
    blocks_BKT = count_BV[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK))
    rest_B1 = count_BV[:, whole * BLOCK :].sum(-1, keepdim=True)
    return torch.cat((blocks_BKT.sum(-1), rest_B1), -1)
