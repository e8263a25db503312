"""A target once more, with 4-bit weights in its linear layers: the model that drafts for itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from longtrain.errors import ConflictError
from longtrain.kernels.int4_linear import Int4Linear
from longtrain.targets.model import Target


class Int4Target(Target):
    """Shares embeddings and norms with the target it is made of; linear layers, the head too, are its own.

    Args:
        target: stays as it is.
        group: most input features that share a scale and a zero.

    Raises:
        ConfigError: a layer's input features fit no group.

    Source: QuantSpec §5 (4-bit weights for the draft).
    Note: the authors quantise the MLPs only; weights are what a step reads at short contexts, so here all
        linear layers are quantised.
    """

    def __init__(self, target: Target, *, group: int) -> None:
        tensors = (*target.model.parameters(), *target.model.buffers())
        model: Any = copy.deepcopy(target.model, {id(tensor): tensor for tensor in tensors})
        with torch.no_grad():
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(parent, name, Int4Linear(child, group))
        super().__init__(model, target.info, target.tokenizer)
        if target.fused is not None:
            self.fuse()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.final_norm_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of embeddings, norms and activations."""
        return self.final_norm_weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """There is none: it is quantised.

        Raises:
            ConflictError: always.
        """
        raise ConflictError("a target with INT4 weights has no head weight to read; use its `head`")

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final normed hidden states [..., E]."""
        return self.model.lm_head(hidden)

    def int4_bytes(self) -> int:
        """Bytes of the 4-bit weights, which the target does not share."""
        return sum(module.bytes() for module in self.modules() if isinstance(module, Int4Linear))
