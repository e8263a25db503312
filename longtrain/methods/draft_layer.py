"""A draft's layer for inference: concatenated projections, with fused operators between them.

Shapes: N tokens or tree nodes of all sequences together, E hidden dim, X inputs of the attention, H query
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
    """Concatenated weights of a draft's self-attention and MLP; methods add their own.

    Args:
        attention: its weights become views of the concatenated ones, unless they are being trained.
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
        """Concatenate linears that share an input; weights that are being trained are copied instead."""
        if not any(one.weight.requires_grad for one in linears):
            return joined(linears)
        dense = joined([copy.deepcopy(one).requires_grad_(False) for one in linears])
        self._copies.append((dense, linears))
        return dense

    def holds(self) -> bool:
        """Return True if the concatenated weights are still the draft's, or copies of its device and dtype.

        `Module.to` reallocates every weight, after which this layer has to be built again.
        """
        now, own = self.attention.q_proj.weight, self.qkv.weight
        if self._copies:
            return (now.device, now.dtype) == (own.device, own.dtype)
        return not now.requires_grad and now.data_ptr() == own.data_ptr()

    @torch.no_grad()
    def renew(self) -> None:
        """Copy the current values of weights that are being trained."""
        for dense, linears in self._copies:
            torch.cat([one.weight for one in linears], out=dense.weight)
            if dense.bias is not None:
                torch.cat([one.bias for one in linears], out=dense.bias)

    def query(self, normed_NX: Tensor, rope: Rope, into: Slots) -> Tensor:
        """Return rotated queries q_NHD of the self-attention; write keys and values to `into`."""
        norms, eps = head_norms(self.attention)
        return rotate_heads(
            self.qkv(normed_NX),
            rope,
            self.heads,
            norms=norms,
            eps=eps,
            into=into,
            neighbours=self.attention.neighbours,
        )[0]

    def keep(self, normed_NX: Tensor, rope: Rope, into: Slots) -> None:
        """Write the tokens' keys and values to their cache positions; nothing else is computed."""
        norms, eps = head_norms(self.attention)
        heads = (0, self.heads[1])
        rotate_heads(
            self.kv(normed_NX),
            rope,
            heads,
            norms=norms,
            eps=eps,
            into=into,
            neighbours=self.attention.neighbours,
        )

    def plus_mlp(self, x_NE: Tensor, norm: RMSNorm) -> Tensor:
        """Return `x + MLP(norm(x))`."""
        return self.down(self.gate_up.swiglu(normed(x_NE, norm)), x_NE)


def normed(x_NE: Tensor, norm: RMSNorm, *, into: Tensor | None = None) -> Tensor:
    """Return `norm(x)`, fused; written to `into` if given."""
    return add_rms_norm(x_NE, None, norm.weight, norm.eps, normed_NE=into)[1]


def head_norms(attention: GroupedQuery) -> tuple[Norms | None, float]:
    """Return the RMSNorm weights of query and key heads, and their eps; without keys, the query's twice."""
    if attention.q_norm is None:
        return None, 1e-6
    k_norm = attention.k_norm or attention.q_norm
    return (attention.q_norm.weight, k_norm.weight), attention.q_norm.eps
