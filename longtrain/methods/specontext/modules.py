"""The retrieval head: EAGLE-3's layer up to its queries and keys.

Shapes: ... leading dims, E hidden dim, X groups of layers, H query heads, G KV heads, D head dim, W
embeddings mixed, L target layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtrain.errors import TargetMismatchError
from longtrain.kernels.devices import kernels_serve
from longtrain.kernels.fused_layer import add_rms_norm, rotate_heads, rotated
from longtrain.kernels.small_linear import serves, small_linear
from longtrain.layers import RMSNorm, SwiGLU
from longtrain.methods.set_objective import SetScorer
from longtrain.methods.specontext.config import EMBEDDING, SHIFTED, group_of, hidden_of
from longtrain.targets.families import family_of

if TYPE_CHECKING:
    from longtrain.layers import Rope
    from longtrain.methods.specontext.config import Config
    from longtrain.targets.info import TargetInfo


class RetrievalHead(SetScorer):
    """Trainable tensors, under the names of the draft's layer, and the table of sets.

    The input for token s is its embedding and the target's hidden state of token s - 1:
    `u = [norm(e) ; norm(f)]`, `q = Wq u`, `k = Wk u`, rotated by position s; with `mlp` u is `u + MLP(u)`.
    The pair is that of EAGLE-3, whose position i has the feature of token i and the embedding of token i + 1.
    So it is known as soon as token s is, before the target reads it.

    Args:
        config: hyperparameters.
        info: the target's shapes.

    Raises:
        TargetMismatchError: a layer that the target does not have, heads that cannot be mapped, attention
            sinks, or no layer that sees the whole text.

    Source: SpeContext §4.3: the embedding and the projections to queries and keys are kept. It does not say
        which features enter.
    """

    evidence_LGX: Tensor

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__()
        if not (full := info.full_layers):
            info.require_full_layers("a retrieval head")
        if family_of(info.family).sinks:
            raise TargetMismatchError(
                f"a retrieval head learns from attention without sinks, and target {info.name} has some; "
                "pass another target"
            )
        E, L, eps = info.hidden_size, info.n_layers, config.rms_norm_eps or info.rms_norm_eps
        self.hidden = hidden_of(config, L)
        if not all(-1 <= layer < L for layer in self.hidden):
            raise TargetMismatchError(
                f"method.layers={list(self.hidden)}; target {info.name} allows 0..{L - 1}"
            )
        if config.sets > len(full):
            raise TargetMismatchError(
                f"method.sets={config.sets}; target {info.name} allows 1..{len(full)} (layers that see the "
                "whole text)"
            )
        heads, groups = config.n_heads or info.n_heads, config.n_kv_heads or info.n_kv_heads
        if heads % groups:
            raise TargetMismatchError(
                f"a head of {heads} query heads on {groups} KV heads; allowed: a multiple"
            )
        if config.mapping == "identity" and groups != info.n_kv_heads:
            raise TargetMismatchError(
                f"a head of {groups} KV heads for target {info.name}, which has {info.n_kv_heads}, with "
                "method.mapping=identity; pass method.mapping=calibrated"
            )
        self.heads, self.dim = (heads, groups), config.head_dim or info.head_dim
        self.sets, self.key_sets = config.sets, 1 if config.share_keys else config.sets
        shifted, size = config.variant == SHIFTED, E if config.variant == EMBEDDING else 2 * E
        n = len(self.hidden)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(E, eps) for _ in range(n)) if shifted and config.fc_norm else None
        )
        self.input_norm = RMSNorm(n * E, eps) if shifted and config.norm_before_fc else None
        self.fc = nn.Linear(n * E, E, bias=False) if shifted else None
        self.input_layernorm = RMSNorm(E, eps)
        self.hidden_norm = RMSNorm(E, eps) if n else None
        self.mix = nn.Parameter(torch.zeros(config.conv, E)) if config.variant == EMBEDDING else None
        self.mlp = SwiGLU(size, config.mlp) if config.mlp else None
        self.q_proj = nn.Linear(size, self.sets * heads * self.dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(size, self.key_sets * groups * self.dim, bias=config.attention_bias)
        self.q_norm = RMSNorm(self.dim, eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.dim, eps) if config.qk_norm else None
        for tensor in self.parameters():
            if tensor.ndim == 2:
                nn.init.normal_(tensor, std=0.02)
        with torch.no_grad():
            if self.mix is not None:
                self.mix[-1] = 1.0
            if self.mlp is not None:
                self.mlp.down_proj.weight.zero_()
        group = {layer: group_of(at, self.sets, len(full)) for at, layer in enumerate(full)}
        own = torch.tensor([[group.get(layer, 0)] for layer in range(L)]) * groups
        self.register_buffer("table_LG", own + torch.arange(info.n_kv_heads) % groups)
        """The set that each KV head of the target reads; layers with a sliding window do not read it."""
        self.register_buffer("evidence_LGX", torch.zeros(L, info.n_kv_heads, self.sets * groups))
        """Attention of each KV head that each set covered during training, used by `remap`."""

    @torch.no_grad()
    def remap(self) -> None:
        """Assign to each KV head the set that covered most of its attention so far."""
        self.table_LG.copy_(self.evidence_LGX.argmax(-1))

    def entry(self, embed: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Return the input of the projections to queries and keys.

        Args:
            embed: embeddings [..., E]; with `mix` those of the last W tokens, [..., W, E].
            states: the target's hidden states of the token before, of layers `hidden`, each [..., E].
        """
        joined = self._joined(embed, states)
        return joined if self.mlp is None else joined + self.mlp(joined)

    def _joined(self, embed: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Return the normed embedding, with the normed feature if any; arguments as in `entry`."""
        normed = _normed(self.input_layernorm, embed)
        if self.mix is not None:
            return (normed * self.mix).sum(-2)
        if self.fc is None:
            feature = states[0]
        else:
            if self.fc_norm is not None:
                states = [_normed(norm, state) for norm, state in zip(self.fc_norm, states, strict=True)]
            joined = torch.cat(tuple(states), -1)
            if self.input_norm is not None:
                joined = _normed(self.input_norm, joined)
            feature = _product(self.fc, joined)
        assert self.hidden_norm is not None
        return torch.cat((normed, _normed(self.hidden_norm, feature)), -1)

    def query(self, entry: Tensor, rope: Rope) -> Tensor:
        """Return rotated queries [..., X * H, D], group after group."""
        return self._turned(_product(self.q_proj, entry), self.q_norm, rope)

    def key(self, entry: Tensor, rope: Rope) -> Tensor:
        """Return rotated keys [..., G, D], or [..., X * G, D] if each group has its own."""
        return self._turned(_product(self.k_proj, entry), self.k_norm, rope)

    def _turned(self, x: Tensor, norm: RMSNorm | None, rope: Rope) -> Tensor:
        """Norm and rotate heads [..., heads, D]; by one kernel if no gradient is needed."""
        lead, size = x.shape[:-1], x.shape[-1]
        if not kernels_serve(x) or rope[0].shape[:-1] != lead:
            heads = x.unflatten(-1, (-1, self.dim))
            return rotated(heads if norm is None else norm(heads), rope)
        cos, sin = (part.reshape(-1, self.dim) for part in rope)
        norms, eps = (None, 0.0) if norm is None else ((norm.weight, norm.weight), norm.eps)
        rows, heads = x.reshape(-1, size), size // self.dim
        turned, _, _ = rotate_heads(rows, (cos, sin), (heads, 0), norms=norms, eps=eps)
        return turned.unflatten(0, lead)


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply the norm; by one kernel if no gradient is needed."""
    assert isinstance(norm, RMSNorm)
    if not kernels_serve(x) or (torch.is_grad_enabled() and norm.weight.requires_grad):
        return norm(x)
    return add_rms_norm(x.reshape(-1, x.shape[-1]), None, norm.weight, norm.eps)[1].view(x.shape)


def _product(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear; for the few tokens of a decoding step by a kernel at memory bandwidth."""
    rows = x.reshape(-1, x.shape[-1])
    if not serves(rows, layer.weight):
        return layer(x)
    return small_linear(rows, layer.weight, residual=layer.bias).unflatten(0, x.shape[:-1])
