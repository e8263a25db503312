"""The LongSpec draft: windowed self-attention, cross-attention to the target's KV cache, and a SwiGLU.

Shapes: R positions with their halo, Q positions whose output is computed, S positions of the target's K and
V, E hidden dim, H query heads, G KV heads, D head dim. `...` stands for any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtrain.kernels.attention.packed import packed_attention
from longtrain.layers import GroupedQuery, RMSNorm, Rope, Startable, SwiGLU, cast_to

if TYPE_CHECKING:
    from longtrain.methods.longspec.config import Config
    from longtrain.methods.longspec.indices import Chunk
    from longtrain.targets.info import TargetInfo


class LongSpecDraft(Startable):
    """Trainable tensors only: embeddings, LM head, rotary and the cross-attention's keys are the target's.

    `h1 = e + SA(norm(e));  h2 = h1 + CA(norm(h1), K*, V*);  h3 = h2 + MLP(norm(h2));  logits = head(h3)`

    Its input is the embedding of each position's own token; no hidden state of the target enters. So the keys
    and values of its self-attention depend on single tokens: it needs no prefill, and chunked training is
    exact.

    Args:
        config: hyperparameters.
        info: the target's shapes; the draft's are the same.

    Source: LongSpec §3.1; the authors' code for what the paper leaves open (order of norms, no final norm).
    Note: targets with QK-norm get `q_norm` in both attentions and `k_norm` in the draft's own. Heads are
        rotated as the target's (in part, if those are), since queries meet the target's keys.
    """

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        hidden, eps, heads = info.hidden_size, info.rms_norm_eps, (info.n_heads, info.n_kv_heads)
        self.window = config.window
        self.scale = info.head_dim**-0.5

        def attention(own_keys: bool) -> GroupedQuery:
            return GroupedQuery(
                hidden,
                heads,
                head_dim=info.head_dim,
                bias=info.attention_bias if config.attention_bias is None else config.attention_bias,
                qk_norm=info.qk_norm,
                eps=eps,
                own_keys=own_keys,
                neighbours=bool(info.rope.get("neighbours")),
            )

        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = attention(own_keys=True)
        self.post_self_attention_layernorm = RMSNorm(hidden, eps) if config.cross_attention else None
        self.cross_attn = attention(own_keys=False) if config.cross_attention else None
        self.post_cross_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, info.intermediate_size)
        self.norm = RMSNorm(hidden, eps) if config.final_norm else None
        for name, tensor in self.named_parameters():
            if name.endswith("_proj.weight"):
                nn.init.normal_(tensor, std=0.02)
            elif name.endswith("_proj.bias"):
                nn.init.zeros_(tensor)

    def forward(
        self,
        embed_RE: Tensor,
        rope_RD: Rope,
        target_kv: tuple[Tensor, Tensor] | None,
        chunk: Chunk,
    ) -> Tensor:
        """Return the LM head's input for the positions of a chunk of one packed sequence.

        Args:
            embed_RE: the target's embeddings of positions `chunk.halo..chunk.stop`.
            rope_RD: the target's cos and sin at those positions.
            target_kv: K (post-RoPE) and V of the whole packed sequence, each [S, G, D]; None without
                cross-attention.
            chunk: the keys that each position sees.

        Returns:
            hidden_QE of positions `chunk.start..chunk.stop`.
        """
        embed_RE = cast_to(self.input_layernorm.weight, embed_RE)
        halo = chunk.start - chunk.halo
        normed_RE = self.input_layernorm(embed_RE)
        k_RGD, v_RGD = self.self_attn.keys_values(normed_RE, rope_RD)
        # keys of the halo are needed, its outputs are not: R -> Q
        embed_QE, rope_QD = embed_RE[halo:], (rope_RD[0][halo:], rope_RD[1][halo:])
        mixed_QHD = packed_attention(
            self.self_attn.query(normed_RE[halo:], rope_QD),
            k_RGD,
            v_RGD,
            chunk.queries,
            chunk.own_k,
            scale=self.scale,
            window=self.window,
        )

        def read(q_QHD: Tensor) -> Tensor:
            assert target_kv is not None
            k_XGD, v_XGD = (_rows(part_SGD, chunk.spans).to(q_QHD.dtype) for part_SGD in target_kv)
            bounds = [0, *accumulate(b - a for a, b in chunk.spans)]
            return packed_attention(q_QHD, k_XGD, v_XGD, chunk.queries, bounds, scale=self.scale)

        return self.after_own(embed_QE, mixed_QHD, rope_QD, read)

    def after_own(self, embed: Tensor, mixed: Tensor, rope: Rope, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the layer after its self-attention.

        Args:
            embed: embeddings [..., E].
            mixed: output of the self-attention, [..., H, D].
            rope: cos and sin of the same positions.
            read: queries [..., H, D] -> attention output over the target's cache, [..., H, D].

        Returns:
            The LM head's input, [..., E].
        """
        h = embed + self.self_attn.output(mixed)
        if self.cross_attn is not None and self.post_self_attention_layernorm is not None:
            query = self.cross_attn.query(self.post_self_attention_layernorm(h), rope)
            h = h + self.cross_attn.output(read(query))
        h = h + self.mlp(self.post_cross_attention_layernorm(h))
        return h if self.norm is None else self.norm(h)


def _rows(x_SGD: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Concatenate spans of the first dim; a single one is not copied."""
    parts = [x_SGD[a:b] for a, b in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
