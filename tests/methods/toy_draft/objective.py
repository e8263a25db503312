"""What the toy draft minimises: KL to the target's law of the next token.

Shapes: T tokens of a packed row, E hidden dim.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from longtrain.methods.toy_draft.config import Config
from longtrain.methods.toy_draft.modules import ToyDraft

from longtrain.data.packing.batch import Batch
from longtrain.losses import fused_linear_kl
from longtrain.methods.spec import Loss, Objective
from longtrain.targets.model import Target
from longtrain.targets.step import OutputRequest


class ToyObjective(Objective):
    """Every token is a root: the draft sees it and the target's hidden states of the token before it."""

    def __init__(self, module: ToyDraft, target: Target, config: Config) -> None:
        super().__init__()
        self.module, self.target = module, target

    def forward(self, batch: Batch) -> Loss:
        """The sum over labels."""
        outputs = OutputRequest("none", hidden=tuple({*self.module.layers, -1}))
        starts, stops = zip(*pairwise(batch.bounds), strict=True)
        pos_T = torch.cat([torch.arange(b - a) for a, b in zip(starts, stops, strict=True)])
        with torch.no_grad():
            step = self.target.packed(batch.ids_T, pos_T.to(batch.ids_T.device), batch.bounds, outputs)
            embed_TE = self.target.embed(batch.ids_T)
        context_TX = torch.cat([step.hidden[layer] for layer in self.module.layers], -1)
        label_T = batch.loss_mask_T.nonzero()[:, 0]
        root_T = label_T[label_T >= 2] - 1
        hidden_TE = self.module(context_TX[root_T - 1], embed_TE[root_T])
        total, hits_T = fused_linear_kl(hidden_TE, step.hidden[-1][root_T], self.target.head_weight)
        count = torch.full((), len(root_T))
        return Loss(
            total, len(root_T), {"loss": (total.detach(), count), "accuracy": (hits_T.float().sum(), count)}
        )
