"""Hyperparameters of the indexer. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.methods.set_learning import SetLearning
from longtrain.settings import Count


@dataclass
class Config(SetLearning):
    """A low-dimensional indexer and how it is trained (RTPurbo, arXiv 2605.16928)."""

    dims: Count = 16  # dimensions of the indexer's query and key of each head (the paper's, for heads of 128)
