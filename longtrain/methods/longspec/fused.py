"""The draft's layer as it runs when drafting: joined products, and fused operators between them.

The same function as `LongSpecDraft` up to rounding. Rows are nodes or tokens, all sequences' together.
Shapes: N rows, E hidden dim, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtrain.kernels.fused_layer import Norms, Slots, add_rms_norm, rotate_heads
from longtrain.targets.fused import Dense, joined

if TYPE_CHECKING:
    from longtrain.layers import GroupedQuery, RMSNorm, Rope
    from longtrain.methods.longspec.modules import LongSpecDraft


class FusedDraft:
    """A draft's weights, joined as they are now.

    Args:
        draft: keeps views of the joined weights; left as it is where it is being trained.
    """

    def __init__(self, draft: LongSpecDraft) -> None:
        own, cross, mlp = draft.self_attn, draft.cross_attn, draft.mlp
        self.draft, self.heads, self.dim = draft, own.heads, own.head_dim
        self._copies: list[tuple[Dense, Sequence[nn.Linear]]] = []
        self.qkv = self._dense(own.q_proj, own.k_proj, own.v_proj)
        rows = self.heads[0] * self.dim
        self.kv = Dense(self.qkv.weight[rows:], None if self.qkv.bias is None else self.qkv.bias[rows:])
        self.out = self._dense(own.o_proj)
        self.cross = None if cross is None else (self._dense(cross.q_proj), self._dense(cross.o_proj))
        self.gate_up, self.down = self._dense(mlp.gate_proj, mlp.up_proj), self._dense(mlp.down_proj)

    def _dense(self, *linears: nn.Linear) -> Dense:
        """One product for several linears; where they are trained, of copies."""
        if not any(one.weight.requires_grad for one in linears):
            return joined(linears)
        dense = joined([copy.deepcopy(one).requires_grad_(False) for one in linears])
        self._copies.append((dense, linears))
        return dense

    def holds(self) -> bool:
        """Whether the joined weights are still the draft's, or where copies of them belong.

        `Module.to` gives every weight a place of its own again.
        """
        now, own = self.draft.self_attn.q_proj.weight, self.qkv.weight
        if self._copies:
            return (now.device, now.dtype) == (own.device, own.dtype)
        return not now.requires_grad and now.data_ptr() == own.data_ptr()

    @torch.no_grad()
    def renew(self) -> None:
        """Copy weights that are trained again, to where they are."""
        for dense, linears in self._copies:
            torch.cat([one.weight for one in linears], out=dense.weight)
            if dense.bias is not None:
                torch.cat([one.bias for one in linears], out=dense.bias)

    def own(self, x_NE: Tensor, rope: Rope, into: Slots) -> Tensor:
        """Queries of the self-attention, rotated, q_NHD; the rows' keys and values go to their slots."""
        qkv_NX = self.qkv(_normed(x_NE, self.draft.input_layernorm))
        norms, eps = _norms(self.draft.self_attn)
        return rotate_heads(qkv_NX, rope, self.heads, norms=norms, eps=eps, into=into)[0]

    def keep(self, x_NE: Tensor, rope: Rope, into: Slots) -> None:
        """Keys and values of rows go to their slots; nothing else is computed."""
        kv_NX = self.kv(_normed(x_NE, self.draft.input_layernorm))
        norms, eps = _norms(self.draft.self_attn)
        rotate_heads(kv_NX, rope, (0, self.heads[1]), norms=norms, eps=eps, into=into)

    def after_own(
        self, x_NE: Tensor, mixed_NX: Tensor, rope: Rope, read: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The layer from the self-attention's result on: the LM head's input, [N, E].

        Args:
            x_NE: embeddings.
            mixed_NX: what the self-attention gathered, heads side by side.
            rope: cos and sin of the same rows.
            read: queries [N, H, D] -> what they gather from the target's cache, heads side by side.
        """
        draft = self.draft
        x_NE = self.out(mixed_NX, x_NE)
        if self.cross is not None and draft.cross_attn is not None:
            query, out = self.cross
            assert draft.post_self_attention_layernorm is not None
            q_NX = query(_normed(x_NE, draft.post_self_attention_layernorm))
            norms, eps = _norms(draft.cross_attn)
            x_NE = out(read(rotate_heads(q_NX, rope, (self.heads[0], 0), norms=norms, eps=eps)[0]), x_NE)
        normed_NE = _normed(x_NE, draft.post_cross_attention_layernorm)
        x_NE = self.down(self.gate_up.swiglu(normed_NE), x_NE)
        return x_NE if draft.norm is None else _normed(x_NE, draft.norm)


def _normed(x_NE: Tensor, norm: RMSNorm) -> Tensor:
    return add_rms_norm(x_NE, None, norm.weight, norm.eps)[1]


def _norms(attention: GroupedQuery) -> tuple[Norms | None, float]:
    """RMSNorms of query and key heads, and their eps; an attention without keys has the former alone."""
    if attention.q_norm is None:
        return None, 1e-6
    k_norm = attention.k_norm or attention.q_norm
    return (attention.q_norm.weight, k_norm.weight), attention.q_norm.eps
