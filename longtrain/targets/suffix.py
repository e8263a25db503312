"""Rows that follow a prompt without entering its cache: a second pass over the detached prefix, with LoRA.

Shapes: N rows of all prompts, B prompts (or 1 packed row of them), T key slots of each, E hidden dim,
H query heads, G KV heads, D head dim, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from longtrain.errors import ConflictError
from longtrain.kernels.importance import Span, suffix_attention
from longtrain.targets.suffix_ops import lora_linears, rotated

if TYPE_CHECKING:
    from longtrain.targets.model import Target

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
            v_BTGD: the values of the prefix.

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
        normed_NE = _norm(layer.input_layernorm, self._x_NE)
        q_NX, k_NX, *v_NX = _linears(layer, names, normed_NE, lora)
        q_NHD, k_NGD = q_NX.view(-1, H, D), k_NX.view(-1, G, D)
        if info.qk_norm:
            q_NHD, k_NGD = _norm(attention.q_norm, q_NHD), _norm(attention.k_norm, k_NGD)
        q_NHD, k_NGD = rotated(torch.cat((q_NHD, k_NGD), 1), *self._rope, H)
        return q_NHD, k_NGD, k_NGD.detach() if last else v_NX[0].view(-1, G, D)

    def _output(self, layer: Any, lora: LayerLora, mixed_NX: Tensor) -> None:
        """The rest of the layer: output projection, MLP, both residuals."""
        (x_NE,) = _linears(layer, GROUPS["o"], mixed_NX, lora.get("o"), add_to=self._x_NE)
        normed_NE = _norm(layer.post_attention_layernorm, x_NE)
        gate_NI, up_NI = _linears(layer, GROUPS["gate_up"], normed_NE, lora.get("gate_up"))
        hidden_NI = layer.mlp.act_fn(gate_NI) * up_NI
        (self._x_NE,) = _linears(layer, GROUPS["down"], hidden_NI, lora.get("down"), add_to=x_NE)


def _linears(
    layer: Any, names: Sequence[str], x_NE: Tensor, lora: Lora | None, *, add_to: Tensor | None = None
) -> list[Tensor]:
    """Outputs of a layer's linears of one input, LoRA included."""
    modules = [layer.get_submodule(name) for name in names]
    weights = [module.weight.to(x_NE.dtype) for module in modules]
    biases = [None if module.bias is None else module.bias.to(x_NE.dtype) for module in modules]
    b = [None if lora is None else lora.b.get(name) for name in names]
    a_XE, scale = (None, 1.0) if lora is None else (lora.a_XE, lora.scale)
    return lora_linears(x_NE, weights, biases, a_XE, b, scale, add_to=add_to)


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
