"""A draft's layer as it runs when drafting: joined products, and fused operators between them.

Shapes: N rows (nodes or tokens, all sequences' together), E hidden dim, X inputs of the attention, H query
heads, G KV heads, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtrain.kernels.fused_layer import Norms, Slots, add_rms_norm, rotate_heads
from longtrain.targets.fused import Dense, joined

if TYPE_CHECKING:
    from longtrain.layers import GroupedQuery, RMSNorm, Rope, SwiGLU


class JoinedLayer:
    """The weights of a draft's self-attention and MLP, joined as they are now; methods add their own.

    Args:
        attention: keeps views of the joined weights; left as it is where it is being trained.
        mlp: likewise.
    """

    def __init__(self, attention: GroupedQuery, mlp: SwiGLU) -> None:
        self.attention, self.heads, self.dim = attention, attention.heads, attention.head_dim
        self._copies: list[tuple[Dense, Sequence[nn.Linear]]] = []
        self.qkv = self.dense(attention.q_proj, attention.k_proj, attention.v_proj)
        rows = self.heads[0] * self.dim
        self.kv = Dense(self.qkv.weight[rows:], None if self.qkv.bias is None else self.qkv.bias[rows:])
        self.out = self.dense(attention.o_proj)
        self.gate_up, self.down = self.dense(mlp.gate_proj, mlp.up_proj), self.dense(mlp.down_proj)

    def dense(self, *linears: nn.Linear) -> Dense:
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
        now, own = self.attention.q_proj.weight, self.qkv.weight
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

    def query(self, normed_NX: Tensor, rope: Rope, into: Slots) -> Tensor:
        """Queries of the self-attention, rotated, q_NHD; the rows' keys and values go to their slots."""
        norms, eps = head_norms(self.attention)
        return rotate_heads(self.qkv(normed_NX), rope, self.heads, norms=norms, eps=eps, into=into)[0]

    def keep(self, normed_NX: Tensor, rope: Rope, into: Slots) -> None:
        """Keys and values of rows go to their slots; nothing else is computed."""
        norms, eps = head_norms(self.attention)
        rotate_heads(self.kv(normed_NX), rope, (0, self.heads[1]), norms=norms, eps=eps, into=into)

    def plus_mlp(self, x_NE: Tensor, norm: RMSNorm) -> Tensor:
        """`x + MLP(norm(x))`."""
        return self.down(self.gate_up.swiglu(normed(x_NE, norm)), x_NE)


def normed(x_NE: Tensor, norm: RMSNorm, *, into: Tensor | None = None) -> Tensor:
    """`norm(x)`, fused; written to `into` if given."""
    return add_rms_norm(x_NE, None, norm.weight, norm.eps, normed_NE=into)[1]


def head_norms(attention: GroupedQuery) -> tuple[Norms | None, float]:
    """RMSNorms of query and key heads, and their eps; an attention without keys has the former alone."""
    if attention.q_norm is None:
        return None, 1e-6
    k_norm = attention.k_norm or attention.q_norm
    return (attention.q_norm.weight, k_norm.weight), attention.q_norm.eps
