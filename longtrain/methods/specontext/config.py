"""Hyperparameters of the retrieval head. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from longtrain.methods.feature_layers import feature_layers
from longtrain.methods.set_learning import SetLearning
from longtrain.settings import Count, CountOrZero, NotNegative, OneOf, wrong

FORMATS = ("sglang",)
"""Values of `export format=`: a folder for SGLang's sparsity framework."""
SHIFTED, EMBEDDING, LAGGED = "shifted", "embedding", "lagged"


@dataclass
class Config(SetLearning):
    """A retrieval head and its training (SpeContext, arXiv 2512.00722, §4; the training is longtrain's)."""

    variant: Annotated[str, OneOf(SHIFTED, EMBEDDING, LAGGED)] = SHIFTED  # what the head reads for a token:
    # shifted: its embedding and EAGLE-3's states of the token before; embedding: embeddings alone; lagged:
    # its embedding and the target's last state of the token before
    layers: list[int] | None = None  # shifted: target layers whose states are read, as in EAGLE-3; null:
    # EAGLE-3's defaults
    sets: Count = 1  # groups of successive layers, each with its own choice; 1: one for all layers (the
    # paper's)
    share_keys: bool = True  # the groups share one key a token and have their own queries; False: their own
    # keys too
    mapping: Annotated[str, OneOf("identity", "calibrated")] = "identity"  # which of the head's choices a KV
    # head of the target reads: identity: the one with its own number; calibrated: the one that held most of
    # its attention in training
    row: Annotated[str, OneOf("token", "feature")] = "token"  # the target's KV entry that a token of the head
    # stands for: token (its own) or feature (that of the token before, whose states it reads)
    conv: Count = 4  # embedding: the last embeddings that are mixed into a token's state
    mlp: CountOrZero = 0  # width of a gated MLP before queries and keys; 0: none, as in the paper
    n_heads: CountOrZero = 0  # query heads; 0: the target's
    n_kv_heads: CountOrZero = 0  # KV heads; 0: the target's
    head_dim: CountOrZero = 0  # size of a head; 0: the target's
    fc_norm: bool = False  # as the draft has it (EAGLE-3.1)
    norm_before_fc: bool = False  # as the draft has it (gpt-oss drafts)
    attention_bias: bool = False  # as the draft has it
    qk_norm: bool = False  # as the draft has it
    rms_norm_eps: NotNegative = 0.0  # 0: the target's
    rope: dict[str, Any] | None = None  # null: the target's. A draft used beyond its training length, as the
    # paper does: {rope_type: yarn, rope_theta: 10000.0, factor: 64.0, original_max_position_embeddings: 2048}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and self.variant != SHIFTED:
            raise wrong("method.layers", self.layers, f"null where method.variant={self.variant}")


def hidden_of(config: Config, n_layers: int) -> tuple[int, ...]:
    """Return the target's outputs that the head reads: layers, or -1 for the final state; may be empty."""
    if config.variant == EMBEDDING:
        return ()
    if config.variant == LAGGED:
        return (-1,)
    return feature_layers(n_layers) if config.layers is None else tuple(config.layers)


def key_offset(config: Config) -> int:
    """Return k such that the head's key s + k scores the target's KV entry s: 1 if `row` is `feature`."""
    return int(config.row == "feature")


def group_of(layer: int, sets: int, n_layers: int) -> int:
    """Return a layer's group; groups are successive, and their sizes differ by at most one layer."""
    return layer * sets // n_layers
