"""A target's decoder with one product for q, k, v, one for gate and up, and fused operators between them.

An MLP that is no SwiGLU without biases (experts, another activation) is called as the module that it is.

Built for one model, at run time: no class is patched, and the model's own modules stay. Their weights become
views of the concatenated ones, so there is no second copy, and code that reads them (LoRA on suffix tokens,
warm starts) works as before.

Shapes: B batch, T new tokens, N = B * T, E hidden dim, X = (H + 2 G) D, I intermediate dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from longtrain.cache.base import PrefixOnly
from longtrain.errors import ConfigError, TargetMismatchError, refusal
from longtrain.kernels.fused_layer import (
    Angles,
    Norms,
    RowPositions,
    add_rms_norm,
    enter_rows,
    rotary,
    rotate_heads,
    swiglu,
)
from longtrain.kernels.int4_linear import Int4Linear
from longtrain.kernels.small_linear import serves, small_linear, small_swiglu
from longtrain.targets.attention import Pass, attend
from longtrain.targets.families import FUSED
from longtrain.targets.step import TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.families import Family
    from longtrain.targets.info import TargetInfo

MLP_NUMBERS = 16384 * 14336
"""Most elements of an MLP's wide activation; longer prompts are processed in pieces.

The wide activations of a whole 128K prompt would take 11 GB at 8B shape.
"""
_CONSTANT_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length."""


@dataclass(frozen=True)
class Dense:
    """A linear layer given by its tensors; few inputs go through the kernel made for them."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_NE: Tensor, residual_NF: Tensor | None = None) -> Tensor:
        """Return the product with [N, E] inputs, plus a residual stream."""
        if serves(x_NE, self.weight) and (self.bias is None or residual_NF is None):
            return small_linear(x_NE, self.weight, residual=residual_NF if self.bias is None else self.bias)
        out_NF = linear(x_NE, self.weight, self.bias)
        return out_NF if residual_NF is None else out_NF + residual_NF

    def swiglu(self, x_NE: Tensor) -> Tensor:
        """Return `silu(gate) * up`, if the layer is gate and up concatenated."""
        if self.bias is None and serves(x_NE, self.weight):
            return small_swiglu(x_NE, self.weight)
        return swiglu(self(x_NE))

    def sum(self, x_NE: Tensor, residual_NF: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream and a product still to be added to it, None if the kernel did that."""
        if self.bias is None and serves(x_NE, self.weight):
            return self(x_NE, residual_NF), None
        return residual_NF, self(x_NE)


Product: TypeAlias = Dense | Int4Linear
"""Concatenated linears of one input, in full precision or in 4 bits."""


@dataclass(frozen=True)
class FusedLayer:
    """The concatenated weights of one decoder layer, and the module they came from.

    Args:
        module: the layer.
        qkv: queries, keys and values.
        out: the attention's output.
        mlp: gate and up, and down; None: the module's own MLP is called.
        norms: weights of the norms of query and key heads.
    """

    module: Any
    qkv: Product
    out: Product
    mlp: tuple[Product, Product] | None
    norms: Norms | None


class FusedDecoder:
    """The decoder without its LM head, as run by `Target`.

    Args:
        body: the model below the LM head (`LlamaModel` and its like).
        info: the target's shapes.
        family: what its layers have that differs from Llama's.

    Raises:
        TargetMismatchError: the family's layers are not fused.
        ConfigError: some of a layer's q, k and v have a bias and some have none.
    """

    def __init__(self, body: Any, info: TargetInfo, family: Family) -> None:
        if not family.fused:
            raise TargetMismatchError(
                f"target {info.name} is of the family {info.family}, whose layers are not fused (fused: "
                f"{', '.join(FUSED)}); pass target.fused=false"
            )
        self.body, self.info, self.family = body, info, family
        with torch.no_grad():
            self.layers = [_fused(layer, info) for layer in body.layers]

    def __call__(
        self, rows: TokenBatch, one_pass: Pass, wanted: Sequence[int], hidden: dict[int, Tensor]
    ) -> Tensor:
        """Return the final normed hidden state [B, T, E]; put outputs of wanted layers into `hidden`."""
        x_NE, normed_NE, rope = self._enter(rows)
        T, E = rows.pos_BT.shape[1], x_NE.shape[1]
        B = len(x_NE) // T
        heads, eps = (self.info.n_heads, self.info.n_kv_heads), self.info.rms_norm_eps
        writes = not isinstance(one_pass.mask, PrefixOnly)
        looks = one_pass.inputs
        before_attention, before_mlp = self.family.norms
        # The norm at the top of each layer is fused with its residual sum: it is the next layer's first norm.
        above = [*(getattr(layer.module, before_attention) for layer in self.layers[1:]), self.body.norm]
        for index, layer in enumerate(self.layers):
            module, attention = layer.module, layer.module.self_attn
            for look in looks:
                look(index, normed_NE.view(B, T, E))
            into = one_pass.cache.tail_slots(index, T) if writes else None
            rotated = rotate_heads(
                layer.qkv(normed_NE),
                rope,
                heads,
                norms=layer.norms,
                eps=eps,
                into=into,
                neighbours=self.family.neighbours,
            )
            q, k, v = (part.unflatten(0, (B, T)).transpose(1, 2) for part in rotated)
            mixed_BTHD, _ = attend(
                attention,
                q,
                k,
                v,
                None,
                scaling=attention.scaling,
                sliding_window=self.info.layer(index).window or None,
                s_aux=getattr(attention, "sinks", None),
                longtrain_pass=one_pass,
                written=into is not None,
            )
            mixed_NX = mixed_BTHD.reshape(B * T, -1)
            if self.family.after is None:
                x_NE, add_NE = _sum(layer.out, mixed_NX, x_NE)
            else:
                add_NE = self._normed(layer.out(mixed_NX), module, 0)
            x_NE, normed_NE = add_rms_norm(x_NE, add_NE, getattr(module, before_mlp).weight, eps)
            x_NE, add_NE = self._mlp(layer, normed_NE, x_NE)
            x_NE, normed_NE = add_rms_norm(x_NE, add_NE, above[index].weight, eps)
            if index in wanted:
                hidden[index] = x_NE.view(B, T, E)
        return normed_NE.view(B, T, E)

    def _mlp(self, layer: FusedLayer, normed_NE: Tensor, x_NE: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream and the MLP's output still to be added to it, None if it was added."""
        # in pieces of tokens, to bound its wide activations
        parts = normed_NE.split(max(1, MLP_NUMBERS // self.info.intermediate_size))
        if layer.mlp is None:
            outputs = [mlp_output(layer.module.mlp, rows_NE) for rows_NE in parts]
        else:
            gate_up, down = layer.mlp
            if len(parts) == 1 and self.family.after is None:
                return _sum(down, gate_up.swiglu(normed_NE), x_NE)
            outputs = [down(gate_up.swiglu(rows_NE)) for rows_NE in parts]
        out_NE = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return x_NE, out_NE if self.family.after is None else self._normed(out_NE, layer.module, 1)

    def _normed(self, out_NE: Tensor, module: Any, which: int) -> Tensor:
        """Return the norm of the output of attention (0) or MLP (1), for families that have one."""
        assert self.family.after is not None
        weight = getattr(module, self.family.after[which]).weight
        return add_rms_norm(out_NE, None, weight, self.info.rms_norm_eps)[1]

    def _enter(self, rows: TokenBatch) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return embeddings [N, E], the first layer's norm of them, and cos and sin, each [N, D]."""
        weight = getattr(self.layers[0].module, self.family.norms[0]).weight
        eps = self.info.rms_norm_eps
        if rows.embeds_BTE is None:
            assert rows.ids_BT is not None
            at = RowPositions(rows.pos_BT.expand(len(rows.ids_BT), -1))
            table_VE = self.body.embed_tokens.weight
            rotation = self.angles() or (lambda pos_BT: self.rope(pos_BT, table_VE.dtype))
            return enter_rows(rows.ids_BT, table_VE, (weight, eps), at, rotation)
        B, T, E = rows.embeds_BTE.shape
        cos_BTD, sin_BTD = self.rope(rows.pos_BT.expand(B, -1), rows.embeds_BTE.dtype)
        x_NE = rows.embeds_BTE.reshape(B * T, E)
        normed_NE = add_rms_norm(x_NE, None, weight, eps)[1]
        return x_NE, normed_NE, (cos_BTD.reshape(B * T, -1), sin_BTD.reshape(B * T, -1))

    def rope(self, pos_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the model's rotary cos and sin [B, T, D], in one launch for constant frequencies."""
        angles = self.angles()
        if angles is None:
            return self.body.rotary_emb(pos_BT.new_empty(0, dtype=dtype), position_ids=pos_BT)
        cos_ND, sin_ND = rotary(pos_BT.reshape(-1), angles.frequency_F, angles.scaling, dtype)
        return cos_ND.view(*pos_BT.shape, -1), sin_ND.view(*pos_BT.shape, -1)

    def angles(self) -> Angles | None:
        """Return the model's rotary embedding, if its frequencies are constant."""
        module = self.body.rotary_emb
        if getattr(module, "rope_type", None) not in _CONSTANT_ROPES:
            return None
        return Angles(module.inv_freq, module.attention_scaling)

    def tensors(self) -> list[Tensor]:
        """Return the first layer's concatenated weights, which identify this decoder until weights move."""
        first = self.layers[0].qkv
        return [first.codes if isinstance(first, Int4Linear) else first.weight]

    def undo(self) -> None:
        """Give every module weights of its own again."""
        for layer in self.layers:
            for linears in _sharing(layer.module, self.info):
                _part(linears)
        self.layers = []


def _sum(product: Product, x_NX: Tensor, residual_NE: Tensor) -> tuple[Tensor, Tensor | None]:
    """Apply `Dense.sum`; products with 4-bit weights always add the residual themselves."""
    if isinstance(product, Dense):
        return product.sum(x_NX, residual_NE)
    return product(x_NX, residual_NE), None


def mlp_output(mlp: Any, rows_NE: Tensor) -> Tensor:
    """Return the output [N, E] of a layer's MLP; some modules return their experts' weights beside it."""
    out_BNE = mlp(rows_NE[None])
    return (out_BNE[0] if isinstance(out_BNE, tuple) else out_BNE)[0]


def _fused(module: Any, info: TargetInfo) -> FusedLayer:
    """Concatenate a layer's weights, one group after the other."""
    attention = module.self_attn
    qkv, *gate_up = (_joined(linears) for linears in _sharing(module, info))
    norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    mlp = (gate_up[0], _alone(module.mlp.down_proj)) if gate_up else None
    return FusedLayer(module, qkv, _alone(attention.o_proj), mlp, norms)


def _alone(one: Any) -> Product:
    """Return a linear that shares its input with no other."""
    return one if isinstance(one, Int4Linear) else Dense(one.weight, one.bias)


def _sharing(module: Any, info: TargetInfo) -> list[list[Any]]:
    """Return the linears of a layer in groups that share an input; gate and up only of a fused MLP."""
    attention, mlp = module.self_attn, module.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj")]
    swiglu = info.hidden_act == "silu" and all(one is not None and one.bias is None for one in gate_up)
    return [qkv, gate_up] if swiglu else [qkv]


def _joined(linears: Sequence[Any]) -> Product:
    """Concatenate several linears to one, of whose weights they become views."""
    return Int4Linear.joined(linears) if isinstance(linears[0], Int4Linear) else joined(linears)


def joined(linears: Sequence[nn.Linear]) -> Dense:
    """Concatenate several linears of one input to one, of whose weights they become views, without gradients.

    Args:
        linears: linears that all have a bias or all have none.

    Raises:
        ConfigError: some have a bias and some have none; nothing is changed then.
    """
    biases = [one.bias for one in linears if one.bias is not None]
    if biases and len(biases) < len(linears):
        raise refusal(
            ConfigError,
            f"linear layers of which {len(biases)} of {len(linears)} have a bias cannot be joined",
            "all of them or none; run without fused layers (target.fused=false)",
        )
    weight = _whole([one.weight for one in linears])
    bias = _whole(biases) if biases else None
    first = 0
    for one in linears:
        rows = slice(first, first + one.weight.shape[0])
        _assign(one, weight[rows], None if bias is None else bias[rows])
        first = rows.stop
    return Dense(weight, bias)


def lying_together(parts: Sequence[Tensor]) -> Tensor | None:
    """Return adjacent tensors in memory as one, without a gradient; None if they are not adjacent."""
    first, at = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return None
        at += part.nbytes
    return first.detach().as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, without a copy if they are adjacent already."""
    whole = lying_together(parts)
    return torch.cat([part.detach() for part in parts]) if whole is None else whole


def _part(linears: Sequence[Any]) -> None:
    """Give linears that share concatenated weights copies of their own."""
    for one in linears:
        if isinstance(one, Int4Linear):
            one.part()
        else:
            _assign(one, one.weight.clone(), None if one.bias is None else one.bias.clone())


def _assign(one: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    one.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        one.bias = nn.Parameter(bias, requires_grad=False)
