"""Hyperparameters of KVzap; defaults are the paper's unless said otherwise. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from longtrain.settings import Count, CountOrZero, OneOf, check


@dataclass
class Config:
    """The layer that predicts scores, its labels, and the entries that are always kept (arXiv 2601.07891)."""

    hidden_dim: CountOrZero = 512  # inner width of the two-layer MLP; 0: one linear layer (KVzap-linear)
    labels: Annotated[str, OneOf("kvzip_plus", "kvzip")] = "kvzip_plus"  # scores to predict, as logarithms:
    # kvzip (attention) or kvzip_plus (attention weighted by norms)
    chunk: Count = 2048  # tokens of the repetition that are run at a time to make labels (KVzip's value)
    sinks: CountOrZero = 4  # first tokens of a prompt, which always stay and have no labels (KVzip's; kvpress
    # has none)
    window: CountOrZero = 128  # newest tokens, which always stay; at most a quarter of the budget (ours)

    def __post_init__(self) -> None:
        check(self, "method")
