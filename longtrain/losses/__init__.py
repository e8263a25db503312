"""Losses on a language-model head, computed in blocks so that full logits never exist; KL of importance."""

from longtrain.losses.blocks import IGNORE, HeadLoss, TopTokens
from longtrain.losses.draft import fused_draft_loss
from longtrain.losses.importance import importance_kl
from longtrain.losses.linear import (
    fused_linear_ce,
    fused_linear_kl,
    fused_linear_top_kl,
    greedy_hits,
    top_tokens,
)

__all__ = [
    "IGNORE",
    "HeadLoss",
    "TopTokens",
    "fused_draft_loss",
    "fused_linear_ce",
    "fused_linear_kl",
    "fused_linear_top_kl",
    "greedy_hits",
    "importance_kl",
    "top_tokens",
]
