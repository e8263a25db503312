"""The DSpark draft: decoder layers over a block of tokens that also read the target's hidden states.

Shapes: A blocks, R rows of a block, E hidden dim, H query heads, G KV heads, D head dim, V vocabulary, K
tokens that the draft can propose, F rank of the Markov head. `...` stands for any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtrain.errors import TargetMismatchError
from longtrain.layers import GroupedQuery, RMSNorm, Rope, SwiGLU
from longtrain.methods.dspark.config import draft_vocab, layers_of

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


class MarkovHead(nn.Module):
    """Corrects a slot's logits by the token before it: `markov_w2 markov_w1[token]`."""

    def __init__(self, vocab_size: int, rank: int, drafted: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return what is added to the logits [..., K] after tokens [...]."""
        return self.markov_w2(self.markov_w1(ids))


class ConfidenceHead(nn.Module):
    """Predicts the logit of a slot's token being accepted, where all before it were."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return logits [...] of slots [..., E] after tokens with Markov embeddings [..., F]."""
        return self.proj(torch.cat((hidden, before), -1)).squeeze(-1)


class DSparkDraft(nn.Module):
    """Trainable tensors, under the names that serving engines expect, and the id of the mask token.

    Every token t before a block enters as `c_t = hidden_norm(fc([states of the target at t]))`, the same for
    all layers, and only as a key and a value: it has no residual stream and no norm of a layer. A block at
    position p is the token x_p and masks, embedded by the target. Layer by layer, with keys of the tokens
    before p and of the whole block (not causal):

    `z = z + SA(norm(z), [c ; norm(z)]);  z = z + MLP(norm(z))`

    Slot k predicts token p + k + 1 by `head(norm(z)) + W2 W1[x_{p+k}]`; the head is the target's, or one of
    the draft's own over a part of the vocabulary (`draft_vocab_size`).

    Args:
        config: hyperparameters.
        info: the target's shapes.

    Raises:
        TargetMismatchError: a layer that the target does not have below its last.

    Source: DSpark eq. 2-5, 7 and the authors' code.
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
        self.markov_head = MarkovHead(whole, rank, drafted) if config.heads != "none" else None
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
        if self.markov_head is not None:
            # Nothing is corrected at first: training begins as DFlash's. The embeddings are large, because a
            # row of them changes only in steps with its token, and the matrix learns as fast as they are.
            nn.init.normal_(self.markov_head.markov_w1.weight)
            nn.init.zeros_(self.markov_head.markov_w2.weight)

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
            x_ARE = layer.input_layernorm(z_ARE)
            q_ARHD = layer.self_attn.query(x_ARE, rope)
            mixed_ARHD = attend(index, q_ARHD, *layer.self_attn.keys_values(x_ARE, rope))
            z_ARE = z_ARE + layer.self_attn.output(mixed_ARHD)
            z_ARE = z_ARE + layer.mlp(layer.post_attention_layernorm(z_ARE))
        return self.norm(z_ARE[:, self.first :])
