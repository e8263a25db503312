"""The EAGLE-3 draft: fuses hidden states of three target layers, then one layer over features and embeddings.

Shapes: E hidden dim, H query heads, G KV heads, D head dim, K tokens of the draft's vocabulary, V of the
target's. `...` stands for any leading dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtrain.errors import TargetMismatchError
from longtrain.layers import GroupedQuery, RMSNorm, Startable, SwiGLU
from longtrain.methods.eagle3.config import draft_vocab, layers_of

if TYPE_CHECKING:
    from longtrain.methods.eagle3.config import Config
    from longtrain.targets.info import TargetInfo


class Eagle3Draft(Startable):
    """Trainable tensors, under the names that serving engines expect, and the draft's vocabulary.

    Position i takes the feature of token i (from the target's hidden states, or from this layer at the
    previous depth) and the embedding of token i + 1; its rotary position is i. It predicts token i + 2:

    `u = [norm(e) ; norm(f)];  x = f + SA(u);  x = x + MLP(norm(x));  logits = lm_head(norm(x))`

    Args:
        config: hyperparameters.
        info: the target's shapes.

    Raises:
        TargetMismatchError: a layer that the target does not have.

    Source: EAGLE-3 §3.1; the authors' code for the order of norms; EAGLE-3.1 for `fc_norm` and `norm_output`.
    """

    draft_ids_K: Tensor

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        self.layers = layers_of(config, info.n_layers)
        if not all(0 <= layer < info.n_layers for layer in self.layers):
            raise TargetMismatchError(
                f"method.layers={list(self.layers)}; target {info.name} allows 0..{info.n_layers - 1}"
            )
        E, n, eps = info.hidden_size, len(self.layers), config.rms_norm_eps or info.rms_norm_eps
        size = draft_vocab(config, info.vocab_size)
        self.norm_output, self.norm_before_residual = config.norm_output, config.norm_before_residual
        heads = (config.n_heads or info.n_heads, config.n_kv_heads or info.n_kv_heads)
        dim = config.head_dim or info.head_dim
        self.scale = dim**-0.5
        self.fc_norm = nn.ModuleList(RMSNorm(E, eps) for _ in range(n)) if config.fc_norm else None
        self.input_norm = RMSNorm(n * E, eps) if config.norm_before_fc else None
        self.fc = nn.Linear(n * E, E, bias=False)
        self.embed_tokens = nn.Embedding(info.vocab_size, E) if config.own_embeddings else None
        self.input_layernorm, self.hidden_norm = RMSNorm(E, eps), RMSNorm(E, eps)
        self.self_attn = GroupedQuery(
            2 * E,
            heads,
            head_dim=dim,
            bias=config.attention_bias,
            qk_norm=config.qk_norm,
            eps=eps,
            outputs=E,
        )
        self.post_attention_layernorm = RMSNorm(E, eps)
        self.mlp = SwiGLU(E, config.intermediate_size or info.intermediate_size)
        self.norm = RMSNorm(E, eps)
        self.lm_head = nn.Linear(E, size, bias=False).requires_grad_(config.head == "trained")
        self.register_buffer("draft_ids_K", torch.arange(size))
        """The target's token id of each token of the draft's vocabulary, ascending, int64."""
        for tensor in self.parameters():
            if tensor.ndim == 2:
                nn.init.normal_(tensor, std=0.02)

    def feature(self, states: Sequence[Tensor]) -> Tensor:
        """Combine the target's hidden states of `layers`, each [..., E], into one feature [..., E]."""
        if self.fc_norm is not None:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(tuple(states), dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def enter(self, embed: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention's input, [..., 2E] (embedding first), and the residual stream [..., E]."""
        normed = self.hidden_norm(feature)
        entry = torch.cat((self.input_layernorm(embed), normed), dim=-1)
        return entry, normed if self.norm_before_residual else feature

    def after_attention(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the layer after its attention.

        Args:
            residual: the residual stream from `enter`, [..., E].
            mixed: attention output, [..., H, D].

        Returns:
            The LM head's input [..., E], and the feature of the next depth [..., E].
        """
        x = residual + self.self_attn.output(mixed)
        x = x + self.mlp(self.post_attention_layernorm(x))
        out = self.norm(x)
        return out, out if self.norm_output else x
