"""A copy of a target with 4-bit weights in its linear layers, used as its own draft."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from longtrain.errors import TargetMismatchError
from longtrain.kernels.int4_linear import Int4Linear
from longtrain.targets.model import Target


class Int4Target(Target):
    """Shares embeddings and norms with a target; linear layers, the head too, are 4-bit copies.

    Args:
        target: the target, which is not changed.
        group: most input features that share a scale and a zero point.

    Raises:
        ConfigError: a layer's input size is no multiple of a group.
        TargetMismatchError: the target has experts.

    Source: QuantSpec §5 (4-bit weights for the draft).
    Note: the authors quantise the MLPs only; at short contexts a step mostly reads weights, so here all
        linear layers are quantised.
    """

    def __init__(self, target: Target, *, group: int) -> None:
        if target.info.experts:
            experts = next(name for name, value in target.model.named_parameters() if value.dim() == 3)
            raise TargetMismatchError(
                f"target {target.info.name} has experts, stored as one tensor a layer ({experts}), and only "
                "linear layers get 4-bit weights; pass method.weight_bits=16, or a target without experts"
            )
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
        """The device of the weights."""
        return self.final_norm_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of embeddings, norms and activations."""
        return self.final_norm_weight.dtype

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of final normed hidden states [..., E]."""
        return self.model.lm_head(hidden)

    def int4_bytes(self) -> int:
        """Return the bytes of the 4-bit weights; all other weights are shared with the original target."""
        return sum(module.bytes() for module in self.modules() if isinstance(module, Int4Linear))
