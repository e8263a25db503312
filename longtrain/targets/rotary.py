"""Computes a rotary embedding, of a model or from its parameters alone.

Shapes: T positions, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longtrain.errors import TargetMismatchError, refusal
from longtrain.kernels.fused_layer import Angles, rotary
from longtrain.targets.info import ROPE_TYPES

if TYPE_CHECKING:
    from longtrain.targets.model import Target


def both_halves(module: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin for both halves of a head, from a rotary module that may give one (gpt-oss)."""
    frequency_F = getattr(module, "inv_freq", None)
    if frequency_F is None or cos.shape[-1] != len(frequency_F):
        return cos, sin
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def layer_rope(target: Target, layer: int, pos_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, T, R] of a layer's rotary embedding (see `Target.rope`, of full layers)."""
    module = target.model.model.rotary_emb
    if not hasattr(module, "layer_types"):  # one table for all layers
        return target.rope(pos_BT, dtype=dtype)
    like = torch.empty(0, device=pos_BT.device, dtype=dtype)
    return both_halves(module, *module(like, pos_BT, target.model.config.layer_types[layer]))


class Rotary:
    """Computes cos and sin of positions, as every supported family does.

    Args:
        parameters: `rope_parameters` of transformers, such as `{"rope_type": "default", "rope_theta": 1e4}`.
        head_dim: D.
        max_positions: the context, which some types scale by.

    Raises:
        TargetMismatchError: a type whose angles change with the length, one that is not known, or one whose
            parameters lack a key or have a value that angles cannot be made of.
    """

    def __init__(self, parameters: Mapping[str, Any], *, head_dim: int, max_positions: int) -> None:
        kind = parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise refusal(TargetMismatchError, f"rotary embedding of type '{kind}'", ", ".join(ROPE_TYPES))
        try:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters=dict(parameters),
            )
            self._module = LlamaRotaryEmbedding(config)
        except (KeyError, TypeError, ValueError) as error:
            raise TargetMismatchError(
                f"rope_parameters={dict(parameters)} (method.rope, or of config.json): {error.args[0]}; "
                "correct them"
            ) from error

    @property
    def frequencies(self) -> Tensor:
        """Radians per position of each pair of dims, fp32 [D / 2]."""
        return self._module.inv_freq

    @property
    def scaling(self) -> float:
        """Factor on cos and sin."""
        return float(self._module.attention_scaling)

    def angles(self, device: torch.device) -> Angles:
        """Return frequencies and scaling as constants on a device."""
        return Angles(self._module.to(device).inv_freq, self.scaling)

    def __call__(self, pos_T: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [T, D] in `dtype` (computed in fp32, as targets do), of positions [T]."""
        angles = self.angles(pos_T.device)
        return rotary(pos_T, angles.frequency_F, angles.scaling, dtype)
