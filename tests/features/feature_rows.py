"""A packed row's documents, and what stands for an objective that reads it."""

from __future__ import annotations

from itertools import pairwise

import torch

from longtrain.targets.step import OutputRequest

BOUNDS = (0, 20, 33, 60, 64)
"""Three documents and padding."""
WANT = OutputRequest("none", hidden=(-1,), kv=(1,))


class Reader(torch.nn.Module):
    """Stands for an objective: asks for a row and gives back what it got."""

    def __init__(self, target, outputs=WANT, pos_T=None):
        super().__init__()
        self.target, self.outputs, self.pos_T = target, outputs, pos_T

    def forward(self, batch):
        pos_T = positions(batch.bounds) if self.pos_T is None else self.pos_T
        return self.target.packed(batch.ids_T, pos_T, batch.bounds, self.outputs)


def positions(bounds):
    return torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])
