"""Brings the channels of the target's states to one size before `fc`.

Shapes: E hidden dim, n layers of the target that are read, N = n E channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.features.probe import probed_states

if TYPE_CHECKING:
    from longtrain.methods.dspark.config import Config
    from longtrain.targets.model import Target

FACTORS = "factor_N"
"""Name of the factors in a module's state."""
SMALLEST = 0.01
"""Share of the median channel's size that smaller channels are taken to have: one that is nearly 0 for the
few tokens that are measured would else be enormous for others."""


def level_factors(target: Target, layers: Sequence[int]) -> Tensor:
    """Return the inverse root mean square of each channel of the states of these layers, fp32 [N].

    Later layers' states are larger than earlier ones', and a few channels many times as large as the rest and
    nearly the same for every token. Without factors these are most of what `hidden_norm` leaves, so that keys
    and values begin alike for all tokens; and as the steps of an adaptive optimiser are equally large for all
    weights, they stay ahead.

    Note: this is longtrain's own; EAGLE-3.1 has norms before `fc`, which no engine reads of a block draft.
    """
    size_N = torch.cat(probed_states(target, layers), dim=-1).pow(2).mean(0).sqrt()
    least = max(float(size_N.median()) * SMALLEST, torch.finfo(size_N.dtype).tiny)
    return 1 / size_N.clamp(min=least)


def without_factors(tensors: Mapping[str, Tensor], config: Config) -> tuple[dict[str, Tensor], Config]:
    """Return a module's state with the factors in `fc`, and the settings of the same draft without them."""
    rest = {name: tensor for name, tensor in tensors.items() if name != FACTORS}
    if FACTORS in tensors:
        weight = tensors["fc.weight"]
        rest["fc.weight"] = (weight.double() * tensors[FACTORS].double()).to(weight.dtype)
    return rest, replace(config, level_inputs=False)
