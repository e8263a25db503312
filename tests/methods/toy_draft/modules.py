"""The toy draft's trainable tensors.

Shapes: E hidden dim, X = E times the layers read; `...` stands for any leading dims.
"""

from __future__ import annotations

import torch
from longtrain.methods.toy_draft.config import Config, layers_of
from torch import Tensor, nn

from longtrain.targets.info import TargetInfo


class ToyDraft(nn.Module):
    """What the target thought of the token before the root, and the tokens from the root on."""

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        self.layers = layers_of(config, info.n_layers)
        self.context = nn.Linear(info.hidden_size * len(self.layers), config.width)
        self.tokens = nn.Linear(info.hidden_size, config.width)
        self.out = nn.Linear(config.width, info.hidden_size)

    def forward(self, context_X: Tensor, tokens_E: Tensor) -> Tensor:
        """The LM head's input [..., E] of nodes, by their context and the mean embedding of their path."""
        dtype = self.out.weight.dtype
        return self.out(torch.tanh(self.context(context_X.to(dtype)) + self.tokens(tokens_E.to(dtype))))
