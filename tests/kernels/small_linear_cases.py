"""Inputs shared by the tests of linear layers for few rows."""

import torch

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two roundings to the dtype."""


def made(*shape, dtype=torch.float32, seed=0, device="cpu"):
    coins = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=coins).to(device, dtype)
