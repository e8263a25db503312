"""Triton kernel of `kernels.block_sums`, and its launch.

Shapes: as in `kernels.block_sums`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import chaining, launched_on

_BLOCKS = 4
"""Blocks of a program."""


@triton.jit
def _sums_kernel(
    weight_ptr, unit_ptr, sum_ptr, weight_b, V, K, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The sums of some blocks of one sequence."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + b * weight_b + token, mask=token < V, other=0.0)
    count = (weight.to(tl.float64) / tl.load(unit_ptr + b)).to(tl.int64)
    tl.store(sum_ptr + b * K + block, tl.sum(count, 1), mask=block < K)


def block_sums(weight_BV: Tensor, unit_B1: Tensor, block: int) -> Tensor:
    """See `kernels.block_sums.block_sums`; `block`: tokens of a block, a power of two."""
    B, V = weight_BV.shape
    K = V // block + 1
    sum_BK = torch.empty((B, K), dtype=torch.int64, device=weight_BV.device)
    with launched_on(weight_BV):
        _sums_kernel[(B, triton.cdiv(K, _BLOCKS))](
            weight_BV, unit_B1.contiguous(), sum_BK, weight_BV.stride(0), V, K,
            BLOCKS=_BLOCKS, BLOCK=block, num_warps=4, **chaining(weight_BV.device),
        )  # fmt: skip
    return sum_BK
