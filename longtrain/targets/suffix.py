"""Rows that follow a prompt without entering its cache: a second pass over the detached prefix, with LoRA.

What few rows cost is launches, so linears with LoRA and RoPE are one autograd node each. Weights of the
target are frozen and get no gradient; those of the LoRA do. Without gradients nothing is saved.
Shapes: N rows of all prompts, B prompts (or 1 packed row of them), T key slots of each, E hidden dim or
inputs of a linear, O outputs of one linear, H query heads, G KV heads, D head dim, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from longtrain.errors import ConflictError
from longtrain.kernels.importance import Span, suffix_attention

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Made = TypeVar("Made")

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


class Beside:
    """Small work that follows a pass layer by layer, on a stream of its own, in what the pass leaves idle.

    The numbers are the same. Elsewhere than on CUDA, and where ranks gather a target's layers together, the
    work is done in the pass's own order.

    Args:
        target: the model that runs the pass.
    """

    def __init__(self, target: Target) -> None:
        self._device = target.device
        parallel = target.device.type == "cuda" and target.shards is None
        self._stream = _stream(target.device) if parallel else None
        self._held: tuple[Tensor, ...] = ()

    def run(self, work: Callable[[], Made], *reads: Tensor) -> Made:
        """Work behind all that was launched so far; what is launched next waits for the work before this.

        Args:
            work: its results are for more such work, or for after `join`.
            reads: what it reads of the pass; they stay until the work is over.
        """
        if self._stream is None:
            return work()
        self.join()
        self._held = reads
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return work()

    def join(self) -> None:
        """Whatever is launched from now on comes after the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._held = ()


@lru_cache(maxsize=8)
def _stream(device: torch.device) -> Any:
    """One a device: memory is kept apart by stream."""
    return torch.cuda.Stream(device)


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
        self._x_NE, self._layer = _between(target, embeds_NE, None, 0), 0
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
            if last:
                return _between(self._target, s_BHT, index, None)
            self._output(layer, self._adapters[index], mixed_NHD.flatten(1))
            self._x_NE = _between(self._target, self._x_NE, index, index + 1)
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


def _between(target: Target, x: Tensor, below: int | None, above: int | None) -> Tensor:
    """The same tensor; in a sharded target, backward gathers the layer below here and frees the one above."""
    return x if target.shards is None else target.shards.regather(x, enter=below, leave=above)


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


def lora_linears(
    x_NE: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    a_XE: Tensor | None,
    b: Sequence[Tensor | None],
    scale: float,
    *,
    add_to: Tensor | None = None,
) -> list[Tensor]:
    """Linears of one input, `x W^T + bias + scale * (x A^T) B^T` each.

    Args:
        x_NE: input.
        weights: frozen W_OE of each.
        biases: frozen bias of each, or None.
        a_XE: the A of those that have LoRA, one below the other; None: none has.
        b: B_OR of each, None where it has no LoRA.
        scale: alpha / R.
        add_to: a residual stream [N, O] that the only linear's output is added to.

    Returns: one output a linear.
    """
    given = [one for one in b if one is not None]
    has = tuple(one is not None for one in b)
    outs = _Linears.apply(x_NE, add_to, a_XE, scale, has, tuple(weights), tuple(biases), *given)
    return list(outs)


def rotated(qk_NXD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """RoPE of queries and keys that lie side by side, halves paired as Hugging Face's Llama does.

    Args:
        qk_NXD: X = H + G heads.
        cos_N1D: cosines.
        sin_N1D: sines, those of the first half with their sign turned.
        heads: H.

    Returns: q_NHD and k_NGD.
    """
    return _Rotated.apply(qk_NXD, cos_N1D, sin_N1D, heads)


class _Linears(torch.autograd.Function):
    """See `lora_linears`. Outputs are written once and added to in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        add_to: Tensor | None,
        a: Tensor | None,
        scale: float,
        has: tuple[bool, ...],
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor | None, ...],
        *b: Tensor,
    ) -> tuple[Tensor, ...]:
        low = torch.mm(x, a.t()) if a is not None else None
        outs, at, rest = [], 0, iter(b)
        for weight, bias, adapted in zip(weights, biases, has, strict=True):
            out = torch.mm(x, weight.t()) if add_to is None else torch.addmm(add_to, x, weight.t())
            if bias is not None:
                out += bias
            if adapted:
                one = next(rest)
                rank = one.shape[1]
                assert low is not None
                out.addmm_(low[:, at : at + rank], one.t(), alpha=scale)
                at += rank
            outs.append(out)
        ctx.save_for_backward(x, a, low, *weights, *b)
        ctx.scale, ctx.has, ctx.residual = scale, has, add_to is not None
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, a, low = ctx.saved_tensors[:3]
        n = len(ctx.has)
        weights, b = ctx.saved_tensors[3 : 3 + n], ctx.saved_tensors[3 + n :]
        d_x = torch.mm(grads[0], weights[0])
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            d_x.addmm_(grad, weight)
        d_a, d_b = None, []
        if a is not None:
            d_low, at = torch.empty_like(low), 0
            adapted = [grad for grad, has in zip(grads, ctx.has, strict=True) if has]
            for grad, one in zip(adapted, b, strict=True):
                part = slice(at, at + one.shape[1])
                torch.mm(grad, one, out=d_low[:, part])
                d_b.append(torch.mm(grad.t(), low[:, part]))
                at += one.shape[1]
            d_low *= ctx.scale
            d_x.addmm_(d_low, a)
            d_a = torch.mm(d_low.t(), x)
            torch._foreach_mul_(d_b, ctx.scale)
        return (d_x, grads[0] if ctx.residual else None, d_a, None, None, None, None, *d_b)


class _Rotated(torch.autograd.Function):
    """See `rotated`; turning back is turning by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, qk: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        turned = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)
        return turned[:, :heads], turned[:, heads:]

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        d = torch.cat((d_q, d_k), 1)
        return torch.addcmul(d * cos, d.roll(d.shape[-1] // 2, -1), sin, value=-1), None, None, None
