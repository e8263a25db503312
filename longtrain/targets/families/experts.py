"""Runs the experts of a layer, for transformers' models: those that a token was sent to, each as one product.

The products of a token must not depend on how many tokens a pass has, or drafts that greedy decoding would
have written are refused; so one kind of product serves every pass, as far as the device has it.

Shapes: N tokens, K experts of each token, E hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from longtrain.costs.training import EXPERT_NUMBERS

NAME = "longtrain"
"""The `experts_implementation` that a target's model is run with."""
FEW = 128
"""Most products (tokens times experts) for which each gets a copy of its weights."""


def run_experts(module: nn.Module, x_NE: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [N, E].

    Args:
        module: the layer's experts, a module of transformers with `use_experts_implementation`.
        x_NE: the tokens.
        ids_NK: the experts of each token.
        weights_NK: their weights.
    """
    rows = max(1, EXPERT_NUMBERS // (ids_NK.shape[1] * x_NE.shape[1]))
    if len(x_NE) > rows:
        parts = zip(x_NE.split(rows), ids_NK.split(rows), weights_NK.split(rows), strict=True)
        return torch.cat([_run(module, *part) for part in parts])
    return _run(module, x_NE, ids_NK, weights_NK)


def _run(module: Any, x_NE: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    on_gpu = x_NE.device.type == "cuda"
    if x_NE.dtype == torch.bfloat16 or not (on_gpu or x_NE.dtype == torch.float64):
        return grouped_mm_experts_forward(module, x_NE, ids_NK, weights_NK)
    if on_gpu and ids_NK.numel() <= FEW:
        # the only one without a synchronisation, which CUDA graphs of decoding steps rule out
        return batched_mm_experts_forward(module, x_NE, ids_NK, weights_NK)
    return type(module).forward.__wrapped__(module, x_NE, ids_NK, weights_NK)


def use_experts(model: Any) -> None:
    """Let a model's experts run here; nothing changes for a model without experts."""
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.config._experts_implementation = NAME


ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
