"""Plain torch twins of `kernels.small_linear`.

Shapes: as there.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear, silu


def small_linear(x_NK: Tensor, weight_FK: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """See `kernels.small_linear.small_linear`."""
    out_NF = linear(x_NK, weight_FK)
    return out_NF if residual is None else out_NF + residual


def small_swiglu(x_NK: Tensor, weight_FK: Tensor) -> Tensor:
    """See `kernels.small_linear.small_swiglu`."""
    gate_NI, up_NI = linear(x_NK, weight_FK).chunk(2, dim=-1)
    return silu(gate_NI) * up_NI
