"""The rotary embedding of a module beside the target: the target's, or its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from longtrain.targets.rotary import Rotary

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target


class RotarySettings(Protocol):
    """Settings of a module with heads."""

    rope: dict[str, Any] | None
    """`rope_parameters` of transformers; None: the target's."""
    head_dim: int
    """0: the target's."""


def rope_of(config: RotarySettings, target: Target) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Positions [...] -> cos and sin [..., D] in the target's dtype.

    Note: a module with heads of another size than the target's has the target's parameters at its own size.
    """
    head_dim = config.head_dim or target.info.head_dim
    if config.rope is None and head_dim == target.info.head_dim:

        def of_target(pos: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = target.rope(pos.reshape(1, -1))
            return cos.view(*pos.shape, -1), sin.view(*pos.shape, -1)

        return of_target
    own = rotary_of(config, target.info)

    def of_draft(pos: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = own(pos.reshape(-1), target.dtype)
        return cos.view(*pos.shape, -1), sin.view(*pos.shape, -1)

    return of_draft


def rotary_of(config: RotarySettings, info: TargetInfo) -> Rotary:
    """The same angles from parameters alone, where they are computed without the target."""
    head_dim = config.head_dim or info.head_dim
    return Rotary(config.rope or info.rope, head_dim=head_dim, max_positions=info.max_positions)
