"""The DSpark draft: decoder layers over a block of tokens that also read the target's hidden states.

Shapes: A blocks, R rows of a block, E hidden dim, H query heads, G KV heads, D head dim, V vocabulary, K
tokens that the draft can propose, F rank of the Markov head. `...` stands for any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtrain.errors import TargetMismatchError
from longtrain.layers import GroupedQuery, RMSNorm, Rope, SwiGLU
from longtrain.methods.dspark.config import MARKOV, SELECTOR, draft_vocab, layers_of
from longtrain.methods.dspark.conv import BlockConv, around, check_groups
from longtrain.methods.dspark.heads import CandidateSelector, ConfidenceHead, MarkovHead, PathHead

if TYPE_CHECKING:
    from longtrain.methods.dspark.config import Config
    from longtrain.targets.info import TargetInfo

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys and values of a block) -> attention output of a layer over the tokens before the
block and over the block itself, like the queries."""

UNCHOSEN = -1
"""Value of `mask_id` before the mask token is chosen."""


class BlockLayer(nn.Module):
    """A decoder layer with Qwen3's norms; its attention is computed by the caller."""

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        E, eps = info.hidden_size, config.rms_norm_eps or info.rms_norm_eps
        self.input_layernorm = RMSNorm(E, eps)
        self.self_attn = GroupedQuery(
            E,
            (config.n_heads or info.n_heads, config.n_kv_heads or info.n_kv_heads),
            head_dim=config.head_dim or info.head_dim,
            qk_norm=True,
            eps=eps,
        )
        self.post_attention_layernorm = RMSNorm(E, eps)
        self.mlp = SwiGLU(E, config.intermediate_size or info.intermediate_size)
        taps, group = config.conv_taps, config.conv_group
        self.attention_conv = BlockConv(E, taps, group) if taps else None
        self.mlp_conv = BlockConv(E, taps, group) if taps else None


class DSparkDraft(nn.Module):
    """Trainable tensors, under the names that serving engines expect, and the id of the mask token.

    Every token t before a block enters as `c_t = hidden_norm(fc([states of the target at t]))`, the same for
    all layers, and only as a key and a value: it has no residual stream and no norm of a layer. A block at
    position p is the token x_p and masks, embedded by the target. Layer by layer, with keys of the tokens
    before p and of the whole block (not causal):

    `z = z + SA(norm(z), [c ; norm(z)]);  z = z + MLP(norm(z))`

    With `conv_taps` each of the two is between two convolutions (`BlockConv`).

    Slot k predicts token p + k + 1 by `head(norm(z)) + W2 W1[x_{p+k}]`, or by a selector (`PathHead`); the
    head is the target's, or one of the draft's own over a part of the vocabulary (`draft_vocab_size`).

    Args:
        config: hyperparameters.
        info: the target's shapes.

    Raises:
        TargetMismatchError: a layer that the target does not have below its last, or groups of channels that
            do not fill its hidden size.

    Source: DSpark eq. 2-5, 7 and the authors' code; DFlash2's authors' code for the two options.
    """

    mask_id: Tensor
    factor_N: Tensor | None
    draft_ids_K: Tensor | None

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        self.read = layers_of(config, info.n_layers)
        last = max(info.n_layers - 2, 0)
        if not all(0 <= layer <= last for layer in self.read):
            raise TargetMismatchError(
                f"method.layers={list(self.read)}; target {info.name} allows 0..{last} (engines disagree "
                "about the output of the last layer)"
            )
        E, eps = info.hidden_size, config.rms_norm_eps or info.rms_norm_eps
        if config.conv_taps:
            check_groups(config.conv_group, E)
        self.first = 0 if config.sample_from_anchor else 1
        """Row of a block that predicts the token after the anchor."""
        factors = torch.ones(len(self.read) * E) if config.level_inputs else None
        self.register_buffer("factor_N", factors)
        """Factors on the channels of the target's states, [len(read) * E]; None: the states as they are."""
        self.block_size = config.block_size
        self.own = tuple(i for i, own in enumerate(config.own_layers) if own)
        """Layers with keys and values of their own of the tokens before blocks; others read the target's."""
        self.fc = nn.Linear(len(self.read) * E, E, bias=False)
        self.hidden_norm = RMSNorm(E, eps)
        self.layers = nn.ModuleList(BlockLayer(config, info) for _ in range(config.n_layers))
        self.norm = RMSNorm(E, eps)
        rank, whole = config.markov_rank, info.vocab_size
        drafted = draft_vocab(config, whole)
        self.markov_head = MarkovHead(whole, rank, drafted) if config.heads in MARKOV else None
        selects, top = config.heads == SELECTOR, min(config.selector_top, whole)
        self.candidate_selector = CandidateSelector(whole, E, rank, top) if selects else None
        own = bool(config.draft_vocab_size)
        self.lm_head = nn.Linear(E, drafted, bias=False) if own else None
        """The LM head of the draft's vocabulary; None: the target's."""
        self.register_buffer("draft_ids_K", torch.arange(drafted) if own else None)
        """The target's id of each token of the draft's vocabulary, ascending, int64; None: all tokens."""
        confident = config.heads == "markov_confidence"
        self.confidence_head = ConfidenceHead(E + rank) if confident else None
        self.register_buffer("mask_id", torch.tensor([UNCHOSEN]))
        """Id of the mask token, int64 [1]; `UNCHOSEN` before training."""
        for tensor in self.parameters():
            if tensor.ndim == 2:
                nn.init.normal_(tensor, std=0.02)
        nn.init.constant_(self.norm.weight, config.start_norm)
        for part in self.modules():
            if isinstance(part, PathHead | BlockConv):
                part.start()

    @property
    def path_head(self) -> PathHead | None:
        """What corrects a slot's logits by the token before it; None: nothing."""
        return self.markov_head if self.markov_head is not None else self.candidate_selector

    @property
    def scale(self) -> float:
        """Softmax scale of the attention."""
        return self.block_layer(0).self_attn.head_dim ** -0.5

    def block_layer(self, index: int) -> BlockLayer:
        """Return a layer."""
        layer = self.layers[index]
        assert isinstance(layer, BlockLayer)
        return layer

    def context(self, states: Sequence[Tensor]) -> Tensor:
        """Combine the target's hidden states of the layers `read`, each [..., E], into c, [..., E]."""
        return self.hidden_norm(self.fc(self.joined(states)))

    def joined(self, states: Sequence[Tensor]) -> Tensor:
        """Return the input of `fc`, [..., len(read) * E]: states of the layers `read`, each [..., E]."""
        joined = torch.cat(tuple(states), dim=-1)
        return joined if self.factor_N is None else joined * self.factor_N.to(joined.dtype)

    def keys_values(self, context: Tensor, rope: Rope) -> list[Tensor]:
        """Return K and V of tokens before blocks for the layers `own`: K of the first, V, K of the second ...

        Args:
            context: of the tokens, [..., E].
            rope: of their positions.

        Returns:
            tensors [..., G, D].
        """
        found: list[Tensor] = []
        for index in self.own:
            found.extend(self.block_layer(index).self_attn.keys_values(context, rope))
        return found

    def block(self, embed_ARE: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Compute the head's input of the rows that predict: [A, block_size, E].

        Args:
            embed_ARE: embeddings of the anchor and of masks.
            rope: cos and sin of the rows' positions, each [A, R, D].
            attend: attention of a layer.
        """
        z_ARE = embed_ARE
        for index in range(len(self.layers)):
            layer = self.block_layer(index)
            mixing = partial(self._attended, index, rope, attend)
            z_ARE = z_ARE + around(layer.attention_conv, layer.input_layernorm(z_ARE), mixing)
            z_ARE = z_ARE + around(layer.mlp_conv, layer.post_attention_layernorm(z_ARE), layer.mlp)
        return self.norm(z_ARE[:, self.first :])

    def _attended(self, index: int, rope: Rope, attend: Attend, x_ARE: Tensor) -> Tensor:
        """Return the output of a layer's attention."""
        attention = self.block_layer(index).self_attn
        q_ARHD = attention.query(x_ARE, rope)
        return attention.output(attend(index, q_ARHD, *attention.keys_values(x_ARE, rope)))
