"""Hyperparameters of DSpark; defaults are those of its authors' code for Qwen3-8B. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from longtrain.settings import Count, CountOrZero, NotNegative, OneOf, Positive, Share, check, wrong

FORMATS = ("speculators", "flat")
"""Values of `export format=`: folders for vLLM, and for vLLM and SGLang."""
MARKOV, SELECTOR = ("markov", "markov_confidence"), "selector"
HEADS = ("none", *MARKOV, SELECTOR)
OBJECTIVES = ("ce_l1", "lk_hybrid")
FEWEST_SLOTS = 4
"""Smallest block: golden outputs, which every export records, draft as many tokens."""
MOST_ROWS = 128
"""Most rows of a block: the kernel of inference has no more under a mask (`tree_attention.MAX_NODES`)."""


@dataclass
class Config:
    """A DSpark draft and how it is trained (DSpark, arXiv 2607.05147; DFlash, arXiv 2602.06036; DFlash2)."""

    layers: list[int] | None = None  # target layers whose outputs are read, lowest first (0-based), without
    # the last one; null: five, spread evenly from the second to the third from the end
    block_size: Count = 7  # tokens that one pass drafts, 4 to 128 (127 where sample_from_anchor=false)
    n_layers: Count = 5  # layers of the draft
    windows: list[int | None] | None = None  # for each layer, the number of tokens before a block that it
    # sees, 5 or more, null: all of them; null for the whole list: all layers see all of them. A window of
    # block_size tokens or fewer allows drafts of one token less than it has
    target_kv: bool = False  # layers that see all tokens read keys and values of the target's last such
    # layer, as LongSpec's draft does, and store none: with windows in the others the draft's cache has a
    # constant size
    heads: Annotated[str, OneOf(*HEADS)] = "markov_confidence"  # none: as DFlash; markov: the token before
    # corrects a slot's logits; markov_confidence: and each slot predicts whether its token is accepted;
    # selector: as DFlash2, the token before and the slot's state choose among the slot's likeliest tokens
    markov_rank: Count = 256  # rank of that correction, or of the selector's scores
    selector_top: Count = 16  # heads=selector: candidates of a slot, the likeliest tokens by the LM head; no
    # other one is drafted
    selector_weight: NotNegative = 1.0  # heads=selector: weight of the cross-entropy of that choice to the
    # target's likeliest token, which replaces the last candidate where it is none
    conv_taps: CountOrZero = 0  # as DFlash2 (2), convolutions over so many rows of a block, each and those
    # before it, before and after the attention and the MLP of each layer; 0: none
    conv_group: Count = 16  # with conv_taps: channels that share the part of its kernel that a row decides
    sample_from_anchor: bool = True  # the block's first slot, which is the newest token, predicts the next
    # one; False: as DFlash, each masked slot predicts its own token, and the block has one slot more
    draft_vocab_size: CountOrZero = 0  # tokens that the draft can propose, the most frequent ones of the
    # labels, by an LM head of its own, which starts as the target's and is trained; 0: all tokens, by the
    # target's head. Needs objective=lk_hybrid
    mask_token: int | None = None  # id of the token that fills a block; null: the tokenizer's mask token, or
    # the first embedding beyond its tokens, or a reserved token, or that of padding or end
    level_inputs: bool = False  # each channel of the target's states is divided by its size, measured before
    # training, and then enters fc; exported folders have the factors in fc
    start_norm: Positive = 1.0  # weights of a new draft's last norm; the target's own, which its LM head is
    # for, may be several times as large, and they move by a learning rate a step
    anchor_every: Count = 8  # one block is trained for so many positions where one can begin, at random among
    # them (512 blocks in 4096 tokens, as the authors); 1: one for each; validation always has all
    block_decay: Positive = 4.0  # slot k of a block weighs exp(-k / block_decay)
    objective: Annotated[str, OneOf(*OBJECTIVES)] = "ce_l1"  # ce_l1: the authors', the next two; lk_hybrid:
    # EAGLE-3's, the KL divergence from the target's distribution while little is accepted, and then 1 -
    # accepted share
    ce_weight: NotNegative = 0.1  # ce_l1: weight of the cross-entropy to the data
    l1_weight: NotNegative = 0.9  # ce_l1: weight of the L1 distance to the target's distribution
    kl_decay: NotNegative = 3.0  # lk_hybrid: the weight of the KL is exp(-kl_decay * accepted share)
    confidence_weight: NotNegative = 1.0  # weight of the confidence's cross-entropy to the accepted share
    min_confidence: Share = 0.0  # in decoding a token is drafted as long as the product of the confidences up
    # to it is at least this, for heads=markov_confidence; 0: every token of a shape
    anchor_offset: bool = False  # Anchor-Offset Indices of LongSpec (arXiv 2502.17421, §3.2)
    anchors: CountOrZero = 4  # with anchor_offset: tokens at the start of a document that keep their
    # positions; they have nothing to do with the anchors of blocks
    offset_max_tokens: CountOrZero = 0  # positions stay below this; 0: the target's own limit
    offset_max_doc_tokens: CountOrZero = 0  # longer documents keep vanilla positions; 0: all are offset
    chunk_tokens: CountOrZero = 8192  # tokens, and slots of blocks, whose activations exist at once (the
    # gradient stays exact); 0: the whole packed sequence
    intermediate_size: CountOrZero = 0  # of the MLPs; 0: the target's
    n_heads: CountOrZero = 0  # query heads; 0: the target's
    n_kv_heads: CountOrZero = 0  # KV heads; 0: the target's
    head_dim: CountOrZero = 0  # size of a head; 0: the target's
    rms_norm_eps: NotNegative = 0.0  # 0: the target's
    rope: dict[str, Any] | None = None  # `rope_parameters` of transformers; null: the target's

    def __post_init__(self) -> None:
        check(self, "method")
        if self.layers is not None and (not self.layers or sorted({*self.layers}) != list(self.layers)):
            raise wrong("method.layers", self.layers, "null, or different layers in ascending order")
        if self.block_size < FEWEST_SLOTS:
            raise wrong("method.block_size", self.block_size, f"{FEWEST_SLOTS} or more")
        if self.rows > MOST_ROWS:
            most = MOST_ROWS + self.block_size - self.rows
            raise wrong("method.block_size", self.block_size, f"{FEWEST_SLOTS} to {most}")
        least = FEWEST_SLOTS + 1
        if self.windows is not None and (
            len(self.windows) != self.n_layers or any(one is not None and one < least for one in self.windows)
        ):
            raise wrong(
                "method.windows",
                self.windows,
                f"null, or for each of the {self.n_layers} layers (method.n_layers) null or {least} or more "
                "tokens",
            )
        if self.target_kv:
            if not 0 < self.own_layers.count(False) < self.n_layers:
                allowed = "with method.target_kv=true a window for some layers and null for others"
                raise wrong("method.windows", self.windows, allowed)
            for key, usual in (("n_kv_heads", 0), ("head_dim", 0), ("rope", None)):
                if getattr(self, key) != usual:
                    allowed = f"{'null' if usual is None else usual} where method.target_kv=true"
                    raise wrong(f"method.{key}", getattr(self, key), allowed)
        unused = {"ce_l1": ("kl_decay",), "lk_hybrid": ("ce_weight", "l1_weight")}[self.objective]
        for one in fields(self):
            if one.name in unused and getattr(self, one.name) != one.default:
                allowed = f"{one.default} where method.objective={self.objective}, which does not use it"
                raise wrong(f"method.{one.name}", getattr(self, one.name), allowed)
        for name, switch, off in (
            ("selector_top", "heads", self.heads != SELECTOR),
            ("selector_weight", "heads", self.heads != SELECTOR),
            ("confidence_weight", "heads", self.heads != "markov_confidence"),
            ("conv_group", "conv_taps", not self.conv_taps),
        ):
            usual = getattr(Config, name)
            if off and getattr(self, name) != usual:
                allowed = f"{usual} where method.{switch}={getattr(self, switch)}, which does not use it"
                raise wrong(f"method.{name}", getattr(self, name), allowed)
        if self.conv_taps > self.rows:
            raise wrong("method.conv_taps", self.conv_taps, f"0 to {self.rows}, the rows of a block")
        if self.draft_vocab_size and self.heads == SELECTOR:
            allowed = "0 where method.heads=selector, which chooses among all tokens (or heads=markov)"
            raise wrong("method.draft_vocab_size", self.draft_vocab_size, allowed)
        if self.draft_vocab_size and self.objective == "ce_l1":
            allowed = "0 where method.objective=ce_l1, whose cross-entropy needs every token (or lk_hybrid)"
            raise wrong("method.draft_vocab_size", self.draft_vocab_size, allowed)
        if self.ce_weight + self.l1_weight == 0:
            raise wrong("method.l1_weight", self.l1_weight, "more than 0 where method.ce_weight=0")
        if self.min_confidence and self.heads != "markov_confidence":
            allowed = f"0 where method.heads={self.heads}, which has no confidence"
            raise wrong("method.min_confidence", self.min_confidence, allowed)

    @property
    def rows(self) -> int:
        """Rows of a block: its slots, and the anchor's own if that predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1

    @property
    def candidates(self) -> int:
        """Tokens of a slot that can be drafted, the likeliest by the LM head alone; 0: all."""
        return self.selector_top if self.heads == SELECTOR else 0

    @property
    def most_levels(self) -> int:
        """Most levels of a draft: a window stores all tokens that a cycle accepts at once, the root too."""
        return min([self.block_size, *(one - 1 for one in self.layer_windows if one is not None)])

    @property
    def own_layers(self) -> tuple[bool, ...]:
        """For each layer, True if it has keys and values of its own of the tokens before blocks."""
        return tuple(window is not None or not self.target_kv for window in self.layer_windows)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: all tokens."""
        return (None,) * self.n_layers if self.windows is None else tuple(self.windows)


def layers_of(config: Config, n_layers: int) -> tuple[int, ...]:
    """Return the target layers whose outputs the draft reads (0-based), lowest first.

    Source: the authors of DFlash spread five layers evenly from layer 1 to layer N - 3.
    Note: in targets of fewer than 8 layers these are as many different ones as there are below the last.
    """
    if config.layers is not None:
        return tuple(config.layers)
    low, high = (1, n_layers - 3) if n_layers >= 8 else (0, max(n_layers - 2, 0))
    return tuple(sorted({round(low + i * (high - low) / 4) for i in range(5)}))


def draft_vocab(config: Config, vocab_size: int) -> int:
    """Return how many tokens the draft can propose, for a target with `vocab_size` tokens."""
    return min(config.draft_vocab_size or vocab_size, vocab_size)
