"""The draft's rotary embedding: the target's, or its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from longtrain.targets.rotary import Rotary

if TYPE_CHECKING:
    from longtrain.methods.eagle3.config import Config
    from longtrain.targets.model import Target


def rope_of(config: Config, target: Target) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Positions [...] -> cos and sin [..., D] in the target's dtype.

    Note: a draft with heads of another size than the target's has the target's parameters at its own size.
    """
    head_dim = config.head_dim or target.info.head_dim
    if config.rope is None and head_dim == target.info.head_dim:

        def of_target(pos: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = target.rope(pos.reshape(1, -1))
            return cos.view(*pos.shape, -1), sin.view(*pos.shape, -1)

        return of_target
    own = Rotary(config.rope or target.info.rope, head_dim=head_dim, max_positions=target.info.max_positions)

    def of_draft(pos: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = own(pos.reshape(-1), target.dtype)
        return cos.view(*pos.shape, -1), sin.view(*pos.shape, -1)

    return of_draft
