"""The target's states for fixed random tokens, on which the sizes of its channels are measured.

Shapes: E hidden dim, T tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from longtrain.data.packing.packed_sequences import positions
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from torch import Tensor

    from longtrain.targets.model import Target

PROBE_TOKENS = 256
"""Number of random tokens."""


@torch.no_grad()
def probed_states(target: Target, layers: Sequence[int]) -> list[Tensor]:
    """Return the target's states of these layers for fixed random tokens, each [T, E] in fp32.

    The first token is excluded, because its state is unlike all others.
    """
    bounds = (0, min(PROBE_TOKENS, target.info.max_positions))
    gen = torch.Generator().manual_seed(0)
    ids_T = torch.randint(target.info.vocab_size, (bounds[1],), generator=gen).to(target.device)
    pos_T = positions(bounds).to(target.device)
    step = target.packed(ids_T, pos_T, bounds, OutputRequest("none", hidden=tuple(layers)))
    return [step.hidden[layer][1:].float() for layer in layers]
