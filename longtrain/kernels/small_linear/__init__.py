"""Linear layers for a few tokens: decoding steps, whose time is that of reading the weights.

Formula: y = x Wᵀ + r, and silu(x Gᵀ) * (x Uᵀ) for weights G concatenated with U.

Triton on a GPU of compute capability 9.0 in bf16 for up to `MAX_ROWS` tokens, if no gradient is needed
(interpreted under TRITON_INTERPRET=1 on any device, in fp32 and fp16); plain torch everywhere else. In Triton
a token's result is the same bit for bit with any number of tokens (up to `MAX_ROWS`): so a draft's tokens are
verified with exactly the numbers that plain decoding computes.

Shapes: N tokens, K input features, F output features, I = F / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from longtrain.kernels.devices import compiles_for, interpreted

MAX_ROWS = 16
"""Most tokens of the Triton kernels; torch's own product is as fast for more."""


def small_linear(x_NK: Tensor, weight_FK: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """Product of tokens with weights, [N, F] in x's dtype.

    Args:
        x_NK: inputs.
        weight_FK: weights of the same dtype.
        residual: added to the rounded product, [N, F] or broadcast to it (a bias [F]).
    """
    if serves(x_NK, weight_FK):
        from longtrain.kernels.small_linear import kernel

        return kernel.small_linear(x_NK, weight_FK, residual)
    out_NF = linear(x_NK, weight_FK)
    return out_NF if residual is None else out_NF + residual


def small_swiglu(x_NK: Tensor, weight_FK: Tensor) -> Tensor:
    """`silu(gate) * up`, [N, I] in x's dtype; the weights are those of gate, then those of up."""
    if serves(x_NK, weight_FK):
        from longtrain.kernels.small_linear import kernel

        return kernel.small_swiglu(x_NK, weight_FK)
    gate_NI, up_NI = linear(x_NK, weight_FK).chunk(2, dim=-1)
    return silu(gate_NI) * up_NI


def serves(x_NK: Tensor, weight_FK: Tensor) -> bool:
    """True if the Triton kernels support these tensors; else plain torch is used."""
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
