"""Rows that follow a prompt without entering its cache: a second pass over the detached prefix, with LoRA.

Shapes: N rows of all prompts, B prompts (or 1 packed row of them), T key slots of each, E hidden dim,
H query heads, G KV heads, D head dim, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from longtrain.errors import ConflictError
from longtrain.kernels.importance import Span, suffix_attention

if TYPE_CHECKING:
    from longtrain.target.model import Target

GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Linears of a decoder layer by the input they share; their names are those of Hugging Face."""

LAST = ("self_attn.q_proj", "self_attn.k_proj")
"""The linears of the last layer that scores depend on."""


@dataclass(frozen=True)
class Lora:
    """LoRA of linears that read one input: each gives `x W^T + scale * (x A^T) B^T`.

    Args:
        a_XE: the A of all of them, one below the other in the order of `b`; X = linears * R.
        b: name of the linear -> its B, [out, R].
        scale: alpha / R.
    """

    a_XE: Tensor
    b: Mapping[str, Tensor]
    scale: float

    def block(self, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
        """The B of all `names` as one matrix [X, sum of sizes], zero where one reads another's A; kept."""
        kept = self.__dict__.setdefault("_block", {})
        if tuple(names) not in kept:
            whole_XO = self.a_XE.new_zeros(self.a_XE.shape[0], sum(sizes))
            at = 0
            order = list(self.b)
            for name, size in zip(names, sizes, strict=True):
                if name in self.b:
                    rank = self.b[name].shape[1]
                    first = order.index(name) * rank
                    whole_XO[first : first + rank, at : at + size] = self.b[name].t()
                at += size
            kept[tuple(names)] = whole_XO
        return kept[tuple(names)]


LayerLora = Mapping[str, Lora]
"""Key of `GROUPS` -> its LoRA; a group that is missing has none."""


class SuffixRun:
    """Rows on their way through the frozen decoder; each sees its prompt and its span's rows up to itself.

    What the prompts' tokens compute is untouched: they are not run again, and nothing is written to a cache.
    The way ends with the last layer's scores: no output of that layer, no final norm, no head. With gradients
    on, only activations of the N rows are kept; the prefix is constant, which is exact (the prompt does not
    depend on rows that follow it).

    A layer's step may follow at once when the prompt's K and V of that layer are there (a `Watch` of the
    prefill): the device then still has the prefill to do while the host launches the many small operators of
    the rows. It gives the same numbers as a pass afterwards.

    Args:
        target: the frozen model.
        embeds_NE: inputs in the dtype to compute in; weights of another dtype are cast as they are used.
        pos_N: rotary positions, int64, on the target's device.
        spans: which rows belong to which prompt and which of its slots they see.
        adapters: LoRA of each layer.

    Source: LookaheadKV §3.1, Eq. 3 (LoRA on the suffix rows only).
    """

    def __init__(
        self,
        target: Target,
        embeds_NE: Tensor,
        pos_N: Tensor,
        spans: Sequence[Span],
        adapters: Sequence[LayerLora],
    ) -> None:
        self._target, self._spans, self._adapters = target, spans, adapters
        self._x_NE, self._layer = embeds_NE, 0
        with torch.autocast(embeds_NE.device.type, enabled=False):
            self._rope = _rope(target, pos_N, embeds_NE.dtype)

    def step(self, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        """Through the next layer: s_BHT in fp32, the column mean of each span's attention on its prompt.

        Args:
            k_BTGD: that layer's keys of the prompts, after RoPE and k_norm.
            v_BTGD: its values.

        Raises:
            ConflictError: the last layer is behind the rows already.
        """
        index, info = self._layer, self._target.info
        if index >= info.n_layers:
            raise ConflictError(f"rows asked through layer {index} of {info.n_layers}; start a new SuffixRun")
        self._layer += 1
        layer, last = self._target.model.model.layers[index], index == info.n_layers - 1
        with torch.autocast(self._x_NE.device.type, enabled=False):
            q_NHD, k_NGD, v_NGD = self._heads(layer, self._adapters[index].get("qkv"), last)
            mixed_NHD, s_BHT = suffix_attention(
                q_NHD, k_NGD, v_NGD, k_BTGD, v_BTGD, self._spans, scale=layer.self_attn.scaling
            )
            if not last:
                self._output(layer, self._adapters[index], mixed_NHD.flatten(1))
        return s_BHT

    def _heads(self, layer: Any, lora: Lora | None, last: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the rows; the last layer's values are not used."""
        info, attention = self._target.info, layer.self_attn
        H, G, D = info.n_heads, info.n_kv_heads, info.head_dim
        names = LAST if last else GROUPS["qkv"]
        sizes = (H * D, G * D, G * D)[: len(names)]
        all_NX = _together(layer, names, sizes, _norm(layer.input_layernorm, self._x_NE), lora)
        qk_NXD = all_NX[:, : (H + G) * D].unflatten(-1, (H + G, D))
        if info.qk_norm:
            parts = _norm(attention.q_norm, qk_NXD[:, :H]), _norm(attention.k_norm, qk_NXD[:, H:])
            qk_NXD = torch.cat(parts, 1)
        qk_NXD = _rotated(qk_NXD, self._rope)
        q_NHD, k_NGD = qk_NXD[:, :H], qk_NXD[:, H:]
        return q_NHD, k_NGD, k_NGD.detach() if last else all_NX[:, (H + G) * D :].unflatten(-1, (G, D))

    def _output(self, layer: Any, lora: LayerLora, mixed_NX: Tensor) -> None:
        """The rest of the layer: output projection, MLP, both residuals."""
        x_NE = _added(self._x_NE, layer.self_attn.o_proj, mixed_NX, lora.get("o"))
        inner = layer.mlp.gate_proj.weight.shape[0]
        normed_NE = _norm(layer.post_attention_layernorm, x_NE)
        both_NI = _together(layer, GROUPS["gate_up"], (inner, inner), normed_NE, lora.get("gate_up"))
        hidden_NI = layer.mlp.act_fn(both_NI[:, :inner]) * both_NI[:, inner:]
        self._x_NE = _added(x_NE, layer.mlp.down_proj, hidden_NI, lora.get("down"))


def suffix_pass(
    target: Target,
    embeds_NE: Tensor,
    pos_N: Tensor,
    prefix: Callable[[int], tuple[Tensor, Tensor]],
    spans: Sequence[Span],
    adapters: Sequence[LayerLora],
    each: Callable[[int, Tensor], None],
) -> None:
    """A `SuffixRun` through all layers of prompts that are in a cache already.

    Args:
        target: the frozen model.
        embeds_NE: see `SuffixRun`, as `pos_N`, `spans` and `adapters`.
        pos_N: rotary positions.
        prefix: layer -> K (after RoPE and k_norm) and V of the prompts, each [B, T, G, D].
        spans: who sees what.
        adapters: LoRA of each layer.
        each: called with (layer, s_BHT).
    """
    run = SuffixRun(target, embeds_NE, pos_N, spans, adapters)
    for layer in range(target.info.n_layers):
        each(layer, run.step(*prefix(layer)))


def _together(
    layer: Any, names: Sequence[str], sizes: Sequence[int], x_NE: Tensor, lora: Lora | None
) -> Tensor:
    """Outputs of linears of one input side by side, [N, sum of sizes]."""
    modules = [layer.get_submodule(name) for name in names]
    if torch.is_grad_enabled():
        return torch.cat(_linears(names, modules, x_NE, lora), -1)
    all_NX = x_NE.new_empty(len(x_NE), sum(sizes))
    for module, out_NX in zip(modules, all_NX.split(list(sizes), -1), strict=True):
        torch.mm(x_NE, module.weight.to(x_NE.dtype).t(), out=out_NX)
        if module.bias is not None:
            out_NX += module.bias.to(x_NE.dtype)
    if lora is not None:
        low_NR = torch.mm(x_NE, lora.a_XE.t())
        all_NX.addmm_(low_NR, lora.block(names, sizes), alpha=lora.scale)
    return all_NX


def _added(x_NE: Tensor, module: Any, in_NX: Tensor, lora: Lora | None) -> Tensor:
    """The residual stream with a linear's output added; one of LoRA has this linear alone."""
    if torch.is_grad_enabled():
        (out_NE,) = _linears(list(lora.b) if lora else [""], [module], in_NX, lora)
        return x_NE + out_NE
    x_NE = torch.addmm(x_NE, in_NX, module.weight.to(x_NE.dtype).t())
    if module.bias is not None:
        x_NE += module.bias.to(x_NE.dtype)
    if lora is not None:
        x_NE.addmm_(
            torch.mm(in_NX, lora.a_XE.t()), lora.block(list(lora.b), [len(x_NE[0])]), alpha=lora.scale
        )
    return x_NE


def _linears(names: Sequence[str], modules: Sequence[Any], x_NE: Tensor, lora: Lora | None) -> list[Tensor]:
    """Outputs of linears of one input, with gradients; their LoRA's first halves are one product."""
    low: dict[str, Tensor] = {}
    if lora is not None:
        parts = linear(x_NE, lora.a_XE).chunk(len(lora.b), -1)
        low = dict(zip(lora.b, parts, strict=True))
    outs = []
    for name, module in zip(names, modules, strict=True):
        bias = None if module.bias is None else module.bias.to(x_NE.dtype)
        out = linear(x_NE, module.weight.to(x_NE.dtype), bias)
        if lora is not None and name in low:
            out = torch.addmm(out, low[name], lora.b[name].t(), alpha=lora.scale)
        outs.append(out)
    return outs


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    """The target's RMSNorm as one operator, in fp32 or wider inside."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    eps = getattr(module, "variance_epsilon", None)
    return rms_norm(x, weight.shape, weight.to(x.dtype), module.eps if eps is None else eps)  # type: ignore[arg-type]


def _rope(target: Target, pos_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos, and sin with the sign that the swapped halves need, each [N, 1, D]."""
    cos_BND, sin_BND = target.rope(pos_N[None], dtype=dtype)
    half = sin_BND.shape[-1] // 2
    sin_ND = torch.cat((-sin_BND[0, :, :half], sin_BND[0, :, half:]), -1)
    return cos_BND[0][:, None], sin_ND[:, None]


def _rotated(x_NHD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE with halves paired as Hugging Face's Llama does, in three operators."""
    cos_N1D, sin_N1D = rope
    return torch.addcmul(x_NHD * cos_N1D, x_NHD.roll(x_NHD.shape[-1] // 2, -1), sin_N1D)
