"""The rotary embedding of a trained module: the target's, or one of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from longtrain.kernels.fused_layer import Rotation
from longtrain.targets.info import draft_rope
from longtrain.targets.rotary import Rotary

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target


class RotarySettings(Protocol):
    """Settings that determine a module's rotary embedding."""

    rope: dict[str, Any] | None
    """`rope_parameters` of transformers; None: the target's (`draft_rope`)."""
    head_dim: int
    """Head dim; 0: the target's."""


class ModuleRope:
    """Maps positions [...] to cos and sin [..., D] in the target's dtype.

    Note: a module with heads of another size than the target's has the target's parameters at its own size,
        and one of a target that rotates a part of each head has its frequencies for whole heads.
    """

    def __init__(self, config: RotarySettings, target: Target) -> None:
        self._target = target
        info = target.info
        same = config.rope is None and (config.head_dim or info.head_dim) == info.head_dim
        same = same and draft_rope(info.rope) == info.rope
        self._own = None if same else rotary_of(config, info)

    def __call__(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin."""
        if self._own is None:
            cos, sin = self._target.rope(pos.reshape(1, -1))
        else:
            cos, sin = self._own(pos.reshape(-1), self._target.dtype)
        return cos.view(*pos.shape, -1), sin.view(*pos.shape, -1)

    @property
    def rotation(self) -> Rotation:
        """The same rotary embedding in the form that kernels take."""
        return self._target.rotation if self._own is None else self._own.angles(self._target.device)


def rotary_of(config: RotarySettings, info: TargetInfo) -> Rotary:
    """Build the same rotary embedding from parameters alone, for use without the target."""
    head_dim = config.head_dim or info.head_dim
    return Rotary(config.rope or draft_rope(info.rope), head_dim=head_dim, max_positions=info.max_positions)
