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


LayerLora = Mapping[str, Lora]
"""Key of `GROUPS` -> its LoRA; a group that is missing has none."""


def suffix_pass(
    target: Target,
    embeds_NE: Tensor,
    pos_N: Tensor,
    prefix: Callable[[int], tuple[Tensor, Tensor]],
    spans: Sequence[Span],
    adapters: Sequence[LayerLora],
    each: Callable[[int, Tensor], None],
) -> None:
    """Run rows through the frozen decoder; each sees its prompt's keys and its span's rows up to itself.

    What the prompts' tokens compute is untouched: they are not run again, and nothing is written to a cache.
    It ends with the last layer's scores: no output of that layer, no final norm, no head. With gradients on,
    only activations of the N rows are kept; the prefix is constant, which is exact (the prompt does not
    depend on rows that follow it).

    Args:
        target: the frozen model.
        embeds_NE: inputs in the dtype to compute in; weights of another dtype are cast as they are used.
        pos_N: rotary positions, int64.
        prefix: layer -> K (after RoPE and k_norm) and V of the prompts, each [B, T, G, D].
        spans: which rows belong to which prompt and which of its slots they see.
        adapters: LoRA of each layer.
        each: called with (layer, s_BHT in fp32): the column mean of each span's attention on its prompt.

    Source: LookaheadKV §3.1, Eq. 3 (LoRA on the suffix rows only).
    """
    info = target.info
    with torch.autocast(embeds_NE.device.type, enabled=False):
        rope = _rope(target, pos_N, embeds_NE.dtype)
        x_NE = embeds_NE
        for index in range(info.n_layers):
            layer, last = target.model.model.layers[index], index == info.n_layers - 1
            lora, attention = adapters[index], layer.self_attn
            normed_NE = _norm(layer.input_layernorm, x_NE)
            names = LAST if last else GROUPS["qkv"]
            q_NX, k_NX, *v_NX = _linears(layer, names, normed_NE, lora.get("qkv"))
            q_NHD = q_NX.unflatten(-1, (info.n_heads, info.head_dim))
            k_NGD = k_NX.unflatten(-1, (info.n_kv_heads, info.head_dim))
            if info.qk_norm:
                q_NHD, k_NGD = _norm(attention.q_norm, q_NHD), _norm(attention.k_norm, k_NGD)
            q_NHD, k_NGD = _rotated(q_NHD, rope), _rotated(k_NGD, rope)
            # The last layer's output is not used, so neither are its values.
            v_NGD = k_NGD.detach() if last else v_NX[0].unflatten(-1, (info.n_kv_heads, info.head_dim))
            k_BTGD, v_BTGD = prefix(index)
            mixed_NHD, s_BHT = suffix_attention(
                q_NHD, k_NGD, v_NGD, k_BTGD, v_BTGD, spans, scale=attention.scaling
            )
            each(index, s_BHT)
            if last:
                return
            (out_NE,) = _linears(layer, GROUPS["o"], mixed_NHD.flatten(1), lora.get("o"))
            x_NE = x_NE + out_NE
            normed_NE = _norm(layer.post_attention_layernorm, x_NE)
            gate_NI, up_NI = _linears(layer, GROUPS["gate_up"], normed_NE, lora.get("gate_up"))
            (out_NE,) = _linears(layer, GROUPS["down"], layer.mlp.act_fn(gate_NI) * up_NI, lora.get("down"))
            x_NE = x_NE + out_NE


def _linears(layer: Any, names: Sequence[str], x_NE: Tensor, lora: Lora | None) -> list[Tensor]:
    """Outputs of linears of one input; their LoRA's first halves are one product."""
    low: dict[str, Tensor] = {}
    if lora is not None:
        parts = linear(x_NE, lora.a_XE).chunk(len(lora.b), -1)
        low = dict(zip(lora.b, parts, strict=True))
    outs = []
    for name in names:
        part, leaf = name.split(".")
        module = getattr(getattr(layer, part), leaf)
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
