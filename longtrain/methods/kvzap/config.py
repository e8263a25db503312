"""Hyperparameters of KVzap; defaults are the paper's unless said otherwise. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from longtrain.settings import Count, CountOrZero, OneOf, check


@dataclass
class Config:
    """The layer that foretells scores, what it learns, and what stays in any case (arXiv 2601.07891)."""

    hidden_dim: CountOrZero = 512  # inner width of the two-layer MLP; 0: one linear layer (KVzap-linear)
    labels: Annotated[str, OneOf("kvzip_plus", "kvzip")] = (
        "kvzip_plus"  # scores to foretell, as their logarithm: kvzip_plus weighs attention by norms
    )
    chunk: Count = 2048  # tokens that the labels' repeat takes at a time (KVzip's; the paper's texts are one)
    sinks: CountOrZero = 4  # first rows of a prompt: no labels, and they stay (KVzip's; kvpress has none)
    window: CountOrZero = 128  # last rows, which stay; at most a quarter of a budget that evicts (ours)

    def __post_init__(self) -> None:
        check(self, "method")
