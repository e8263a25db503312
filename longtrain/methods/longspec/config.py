"""Hyperparameters of LongSpec; defaults are the paper's unless said otherwise. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from longtrain.errors import ConfigError
from longtrain.settings import Count, CountOrZero, OneOf, check, wrong

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo

LARGE_VOCABULARY = 32768
"""Vocabulary size from which on drafts use a 4-bit copy of the LM head by default."""


@dataclass
class Config:
    """A LongSpec draft and how it is trained (LongSpec, arXiv 2502.17421, §3.1-3.2)."""

    window: Count = 512  # previous tokens the draft's self-attention sees, besides the token itself (§3.1)
    cross_attention: bool = True  # attend to the target's KV cache (§3.1); False only as an ablation
    attention_bias: bool | None = None  # biases on q, k, v; null: as the target has them; the authors: true
    kv_source_layer: int = -1  # target layer whose K and V are read; -1: the last that sees the whole text
    final_norm: bool = False  # RMSNorm before the shared LM head; the paper has none
    warm_start: bool = True  # begin with the target's own weights; the paper does not say how it begins
    max_depth: Count = 5  # shifts are drawn from 1..max_depth; a node at depth t needs shift t+1 (§3.2)
    flash_noisy: bool = True  # draw shifts (flash noisy training, §3.2); False: always 1
    shift_weights: list[float] = field(default_factory=list)  # relative weight of each shift; []: uniform
    anchor_offset: bool = False  # Anchor-Offset Indices (§3.2); on in the short stage only
    anchors: CountOrZero = 4  # tokens that keep their positions, the attention sinks (§3.2)
    offset_max_tokens: CountOrZero = 0  # positions stay below this (paper: 15k or 30k); 0: the target's limit
    offset_max_doc_tokens: CountOrZero = 0  # longer documents keep vanilla positions; 0: all are offset
    guard_every: CountOrZero = 64  # one training micro-batch in N, on average (by its seed), checks the
    # target's own loss under offsets; 0: never
    objective: Annotated[str, OneOf("kl", "ce")] = "kl"  # kl: to the target's whole distribution; ce: to the
    # data's tokens (the paper's)
    head_bits: Annotated[int, OneOf(0, 4, 16)] = 0  # bits of the LM head that drafts use; 16: the target's
    # own; 4: a 4-bit copy, read in a third of the time; 0: the copy on a GPU for up to 16 tokens a level if
    # the vocabulary has 32768 tokens or more
    chunk_tokens: CountOrZero = 8192  # tokens whose activations exist at once (the gradient stays exact); 0:
    # the whole packed sequence

    def __post_init__(self) -> None:
        check(self, "method")
        weights = self.shift_weights
        if weights and (len(weights) != self.max_depth or min(weights) < 0 or sum(weights) <= 0):
            allowed = f"[], or method.max_depth={self.max_depth} weights, none negative and not all 0"
            raise wrong("method.shift_weights", weights, allowed)

    def copies_head(self, vocab_size: int, *, faster: bool) -> bool:
        """Return True if drafts use a 4-bit copy of the LM head; `faster`: its kernel runs on the device."""
        return self.head_bits == 4 or (self.head_bits == 0 and faster and vocab_size >= LARGE_VOCABULARY)


def source_layer(config: Config, info: TargetInfo) -> int:
    """Return the index of the target layer whose keys and values a draft reads.

    Raises:
        ConfigError: the target has no such layer, or one that does not see the whole text or whose keys have
            another rotary embedding than the draft's queries.
    """
    layer, n = config.kv_source_layer, info.n_layers
    fits = info.readable_layers
    if layer == -1 and fits:
        return fits[-1]
    if -n <= layer < n and layer % n in fits:
        return layer % n
    allowed = f"-1, {', '.join(map(str, fits))}" if len(fits) < n else f"{-n}..{n - 1}"
    raise ConfigError(
        f"method.kv_source_layer={layer}; target {info.name} allows {allowed if fits else 'none'} (layers "
        "that see the whole text, with the rotary embedding of the draft)"
    )
