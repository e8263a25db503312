"""Losses on a language-model head, without ever holding the logits of a whole row; KL of importance."""

from longtrain.losses.blocks import IGNORE, HeadLoss, TopLaw
from longtrain.losses.draft import fused_draft_loss
from longtrain.losses.importance import importance_kl
from longtrain.losses.linear import (
    fused_linear_ce,
    fused_linear_kl,
    fused_linear_top_kl,
    greedy_hits,
    top_law,
)

__all__ = [
    "IGNORE",
    "HeadLoss",
    "TopLaw",
    "fused_draft_loss",
    "fused_linear_ce",
    "fused_linear_kl",
    "fused_linear_top_kl",
    "greedy_hits",
    "importance_kl",
    "top_law",
]
