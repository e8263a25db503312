"""Linear layers for a few rows: steps of decoding, whose time is the reading of weights.

Formula: y = x Wᵀ + r, and silu(x Gᵀ) * (x Uᵀ) for weights G over U.
Triton on a GPU of compute capability 9.0 in bf16 for up to `MAX_ROWS` rows, where no gradient is asked for
(interpreted under TRITON_INTERPRET=1 on any device, in fp32 and fp16); plain torch everywhere else. A row's
result there is the same bit for bit however many rows (up to `MAX_ROWS`) come with it: a draft's tokens are
checked by the very numbers that plain decoding would have computed.
Shapes: N rows, K input features, F output features, I = F / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from longtrain.kernels.devices import compiles_for, interpreted

MAX_ROWS = 16
"""Most rows of the Triton kernels; torch's own product does as well for more."""


def small_linear(x_NK: Tensor, weight_FK: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """Product of rows with weights, [N, F] in x's dtype.

    Args:
        x_NK: rows.
        weight_FK: weights of the same dtype.
        residual: what is added to the rounded product, [N, F] or what expands to it (a bias [F]).
    """
    if serves(x_NK, weight_FK):
        from longtrain.kernels.small_linear import kernel

        return kernel.small_linear(x_NK, weight_FK, residual)
    out_NF = linear(x_NK, weight_FK)
    return out_NF if residual is None else out_NF + residual


def small_swiglu(x_NK: Tensor, weight_FK: Tensor) -> Tensor:
    """`silu(gate) * up`, [N, I] in x's dtype, of the products with gate weights and up weights below them."""
    if serves(x_NK, weight_FK):
        from longtrain.kernels.small_linear import kernel

        return kernel.small_swiglu(x_NK, weight_FK)
    gate_NI, up_NI = linear(x_NK, weight_FK).chunk(2, dim=-1)
    return silu(gate_NI) * up_NI


def serves(x_NK: Tensor, weight_FK: Tensor) -> bool:
    """Whether the Triton kernels take these; plain torch does otherwise."""
    N, K = x_NK.shape
    if not 0 < N <= MAX_ROWS or x_NK.dtype != weight_FK.dtype or x_NK.device != weight_FK.device:
        return False
    if torch.is_grad_enabled() and (x_NK.requires_grad or weight_FK.requires_grad):
        return False
    if x_NK.stride(1) != 1 or weight_FK.stride(1) != 1 or K % 16 or weight_FK.stride(0) % 8:
        return False
    if interpreted():
        return x_NK.dtype in (torch.float32, torch.float16)
    return (
        x_NK.dtype == torch.bfloat16 and weight_FK.data_ptr() % 16 == 0 and compiles_for(x_NK.device, (9, 0))
    )
