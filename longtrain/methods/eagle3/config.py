"""Hyperparameters of EAGLE-3; defaults are the paper's, or its authors' code's. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from longtrain.methods.feature_layers import feature_layers
from longtrain.settings import Count, CountOrZero, NotNegative, OneOf, Positive, check, wrong

FORMATS = ("speculators", "flat")
"""Values of `export format=`: folders for vLLM, and for SGLang and vLLM."""
OBJECTIVES = ("kl", "lk", "lk_hybrid", "tv")


@dataclass
class Config:
    """An EAGLE-3 draft and how it is trained (EAGLE-3, arXiv 2503.01840, §3)."""

    layers: list[int] | None = None  # target layers whose outputs are read, lowest first (0-based); null: as
    # the authors choose them, three evenly spread ones where the target has fewer than 8 layers
    draft_vocab_size: CountOrZero = 32000  # size of the draft's vocabulary, the most frequent tokens of the
    # training answers; 0 or at least the target's: the target's vocabulary
    depths: Count = 7  # steps of the training-time test (§3.2; the authors' code)
    depth_decay: Positive = 0.8  # weight of depth k is depth_decay ** k (the authors' code)
    objective: Annotated[str, OneOf(*OBJECTIVES)] = "lk_hybrid"  # kl: the paper's; lk: -log of the accepted
    # share; lk_hybrid: from kl to 1 - accepted share; tv: 1 - accepted share
    kl_decay: NotNegative = 3.0  # lk_hybrid: the weight of kl is exp(-kl_decay * accepted share)
    warm_start: bool = True  # begin with the target's own weights where they fit; False: at random
    start_mlp: Annotated[str, OneOf("copied", "random")] = "copied"  # of a warm start: the MLP of layer 0
    start_outputs: Annotated[str, OneOf("random", "zero")] = "zero"  # the projections out of attention and
    # MLP; zero: the copied MLP gives nothing at first
    start_norm: Annotated[str, OneOf("scaled", "copied", "ones")] = "scaled"  # the last norm: the target's,
    # scaled down until guesses are nearly uniform; the target's; or ones
    start_inputs: Annotated[str, OneOf("plain", "level")] = "plain"  # level: norms before fc turn down the
    # channels of the target's states that are far larger than the others
    head: Annotated[str, OneOf("trained", "frozen")] = "trained"  # the LM head over the draft's vocabulary
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm on each of the target's states before fc
    norm_output: bool = False  # EAGLE-3.1: the next depth reads the state after the last norm, not before it
    norm_before_fc: bool = False  # one RMSNorm on all states together before fc (gpt-oss drafts)
    norm_before_residual: bool = False  # the residual stream begins with the normed feature
    window: CountOrZero = 0  # previous tokens the draft sees, besides the token itself; 0: all of them
    sinks: CountOrZero = 0  # first tokens of a document that are seen beside a window
    anchor_offset: bool = False  # Anchor-Offset Indices of LongSpec (arXiv 2502.17421, §3.2)
    anchors: CountOrZero = 4  # tokens that keep their positions
    offset_max_tokens: CountOrZero = 0  # positions stay below this; 0: the target's own limit
    offset_max_doc_tokens: CountOrZero = 0  # longer documents keep vanilla positions; 0: all are offset
    chunk_tokens: CountOrZero = 8192  # tokens whose activations exist at once (the gradient stays exact); 0:
    # the whole packed sequence
    intermediate_size: CountOrZero = 0  # of the MLP; 0: the target's
    n_heads: CountOrZero = 0  # query heads; 0: the target's
    n_kv_heads: CountOrZero = 0  # KV heads; 0: the target's
    head_dim: CountOrZero = 0  # size of a head; 0: the target's
    attention_bias: bool = False  # biases on q, k and v
    qk_norm: bool = False  # RMSNorm on each head of q and k
    rms_norm_eps: NotNegative = 0.0  # 0: the target's
    rope: dict[str, Any] | None = None  # `rope_parameters` of transformers; null: the target's
    own_embeddings: bool = False  # the draft has its own embedding table (some imported drafts)

    def __post_init__(self) -> None:
        check(self, "method")
        if self.fc_norm and self.norm_before_fc:
            raise wrong("method.norm_before_fc", True, "false where method.fc_norm=true: one norm before fc")
        if self.layers is not None and (not self.layers or sorted({*self.layers}) != list(self.layers)):
            raise wrong("method.layers", self.layers, "null, or different layers in ascending order")
        if self.sinks and not self.window:
            raise wrong("method.sinks", self.sinks, "0 where method.window=0: every token is seen")
        if self.window and self.window <= self.depths:
            raise wrong("method.window", self.window, f"0, or more than method.depths={self.depths}")


def layers_of(config: Config, n_layers: int) -> tuple[int, ...]:
    """Return the target layers whose outputs the draft reads (0-based), lowest first.

    Source: see `feature_layers`.
    """
    return feature_layers(n_layers) if config.layers is None else tuple(config.layers)


def draft_vocab(config: Config, vocab_size: int) -> int:
    """Return the size of the draft's vocabulary, for a target with `vocab_size` tokens."""
    return min(config.draft_vocab_size or vocab_size, vocab_size)
