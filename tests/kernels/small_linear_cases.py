"""Inputs shared by the tests of linear layers for few rows."""

import torch
from torch.nn.functional import linear, silu

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two roundings to the dtype."""


def made(*shape, dtype=torch.float32, seed=0, device="cpu"):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(device, dtype)


def among_nan(x):
    """The same rows cut out of a wider tensor, whose other columns no kernel may read."""
    wide = x.new_full((len(x), x.shape[1] + 24), torch.nan)
    wide[:, 8:-16] = x
    return wide[:, 8:-16]


def small_linear(x_NK, weight_FK, *, residual=None):
    """What `kernels.small_linear.small_linear` computes."""
    out_NF = linear(x_NK, weight_FK)
    return out_NF if residual is None else out_NF + residual


def small_swiglu(x_NK, weight_FK):
    """What `kernels.small_linear.small_swiglu` computes."""
    gate_NI, up_NI = linear(x_NK, weight_FK).chunk(2, dim=-1)
    return silu(gate_NI) * up_NI
