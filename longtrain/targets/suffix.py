"""Runs tokens after a prompt without entering its cache: a second pass over a detached prefix, with LoRA.

With few tokens, kernel launches dominate, so linears of one input (`targets.lora`) and RoPE are one autograd
node each. The target's weights are frozen and get no gradient; those of the LoRA do. Without gradients
nothing is saved.

Shapes: N suffix tokens of all prompts, B prompts (or 1 packed sequence of them), T keys of each, E hidden
dim, I inner dim of the MLP, H query heads, G KV heads, D head dim, X heads of queries, keys and values
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from longtrain.kernels.fused_layer import rotated as rotated_part
from longtrain.kernels.importance import Span, suffix_attention
from longtrain.targets.fused import lying_together, mlp_output
from longtrain.targets.lora import Lora, Place, Use, lora_linears, unstacked
from longtrain.targets.rotary import layer_rope

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


class Beside:
    """Runs small work layer by layer beside a forward, on a CUDA stream of its own, in the GPU's idle parts.

    The results are the same. On other devices, and if ranks gather a target's layers together, the
    work is done in the forward's own order.

    Args:
        target: the model that runs the forward.
    """

    def __init__(self, target: Target) -> None:
        self._device = target.device
        parallel = target.device.type == "cuda" and target.shards is None
        self._stream = _stream(target.device) if parallel else None
        self._held: tuple[Tensor, ...] = ()

    def run(self, work: Callable[[], Made], *reads: Tensor) -> Made:
        """Run work after everything launched so far; the next call waits for this work.

        Args:
            work: its results may be used in further such work, or after `join`.
            reads: tensors of the forward that it reads; they are kept alive until the work is done. All else
                that was allocated outside such work and that it reads must be kept alive by its owner.
        """
        if self._stream is None:
            return work()
        self.join()
        self._held = reads
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return work()

    def join(self) -> None:
        """Make everything launched from now on wait for the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._held = ()


@lru_cache(maxsize=8)
def _stream(device: torch.device) -> Any:
    """Return one stream per device: the allocator keeps memory apart by stream."""
    return torch.cuda.Stream(device)


class SuffixRun:
    """Runs suffix tokens through the frozen decoder; each sees its prompt and its span's tokens up to itself.

    The prompts' tokens are not run again, and nothing is written to a cache. In a layer with a sliding window
    they see its last positions only, and give no scores. The run ends with the scores of the last layer that
    sees the whole text: there is no output of that layer, no final norm, no head. With gradients enabled,
    only activations of the N tokens are saved; the prefix is constant, which is exact (the prompt does not
    depend on tokens that follow it).

    A layer's step may follow as soon as the prompt's K and V of that layer are there (an `AttentionHook` of
    the prefill): the GPU is then still busy with the prefill while the host launches the many small
    operators of the suffix. The results are the same as those of a pass afterwards.

    Args:
        target: the frozen model.
        embeds_NE: inputs in the dtype to compute in; weights of another dtype are cast as they are used.
        pos_N: rotary positions, int64, on the target's device.
        spans: the suffix tokens of each prompt, and the keys that they see.
        adapters: LoRA of linears of `GROUPS`; that of the run's last layer may be that of `LAST` alone.

    Source: LookaheadKV §3.1, Eq. 3 (LoRA on the suffix tokens only).
    """

    def __init__(
        self,
        target: Target,
        embeds_NE: Tensor,
        pos_N: Tensor,
        spans: Sequence[Span],
        adapters: Sequence[Lora],
    ) -> None:
        self._target, self._spans, self._adapters = target, spans, adapters
        self._lora: dict[Place, tuple[Tensor, Tensor]] = {}
        self._uses: list[Use] = []
        self._x_NE, self._layer = _between(target, embeds_NE, None, 0), 0
        # Kept while the run lasts: `Beside` runs the first layer on a stream of its own, and the memory of an
        # input without another owner would be given to the forward while that layer still reads it.
        self._embeds_NE = embeds_NE
        self.last = target.info.full_layers[-1]
        """The layer that the run ends with."""
        with torch.autocast(embeds_NE.device.type, enabled=False):
            self._ropes = _ropes(target, pos_N, embeds_NE.dtype)

    def step(self, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor | None:
        """Run the next layer; return s_BHT in fp32, each span's mean attention to its prompt's keys.

        None: the layer has a sliding window.

        Args:
            k_BTGD: that layer's keys of the prompts, after RoPE and k_norm.
            v_BTGD: the values of the prefix.
        """
        index, info = self._layer, self._target.info
        if not index:  # here, so that its backward is on the same stream
            self._lora = unstacked(self._adapters, self._uses)
        self._layer += 1
        layer, last, window = self._target.model.model.layers[index], index == self.last, info.windows[index]
        with torch.autocast(self._x_NE.device.type, enabled=False):
            heads = self._heads(layer, last)
            scale, s_BHT = layer.self_attn.scaling, None
            if window:
                mixed_NHD = window_attention(*heads, k_BTGD, v_BTGD, self._spans, scale=scale, window=window)
            else:
                mixed_NHD, s_BHT = suffix_attention(*heads, k_BTGD, v_BTGD, self._spans, scale=scale)
            if last:
                assert s_BHT is not None
                return _between(self._target, s_BHT, index, None)
            self._output(layer, mixed_NHD.flatten(1))
            self._x_NE = _between(self._target, self._x_NE, index, index + 1)
        return s_BHT

    def _heads(self, layer: Any, last: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the suffix tokens; the last layer's values are not used."""
        info, attention = self._target.info, layer.self_attn
        H, G, D = info.n_heads, info.n_kv_heads, info.head_dim
        _, b_OR = self._lora.get((self._layer - 1, "qkv"), (None, None))
        short = last and (b_OR is None or len(b_OR) == (H + G) * D)
        heads, names = ((H, G), LAST) if short else ((H, G, G), GROUPS["qkv"])
        normed_NE = self._normed(layer, self._target.family.norms[0], self._x_NE)
        # [N, E] -> [N, H + 2 G, D], or [N, H + G, D] where values are not needed
        qkv_NXD = self._linears(layer, "qkv", normed_NE, names=names).view(-1, sum(heads), D)
        if info.qk_norm:
            q_NHD, k_NGD, *v_NGD = qkv_NXD.split(heads, 1)
            q_NHD = self._normed(attention, "q_norm", q_NHD)
            k_NGD = self._normed(attention, "k_norm", k_NGD)
            qkv_NXD = torch.cat((q_NHD, k_NGD, *v_NGD), 1)
        q_NHD, k_NGD, *v_NGD = self._turned(qkv_NXD, heads)
        return q_NHD, k_NGD, k_NGD.detach() if last else v_NGD[0]

    def _output(self, layer: Any, mixed_NX: Tensor) -> None:
        """Compute the rest of the layer: output projection, MLP, both residuals."""
        family = self._target.family
        x_NE = self._added(layer, "o", mixed_NX, self._x_NE)
        normed_NE = self._normed(layer, family.norms[1], x_NE)
        if family.swiglu:
            gate_NI, up_NI = self._linears(layer, "gate_up", normed_NE).chunk(2, 1)
            self._x_NE = self._added(layer, "down", layer.mlp.act_fn(gate_NI) * up_NI, x_NE)
            return
        out_NE = mlp_output(layer.mlp, normed_NE.to(self._target.dtype)).to(x_NE.dtype)
        self._x_NE = x_NE + (out_NE if family.after is None else self._normed(layer, family.after[1], out_NE))

    def _added(self, layer: Any, group: str, inner_NX: Tensor, x_NE: Tensor) -> Tensor:
        """Return the residual stream plus the output of attention ("o") or MLP ("down"), maybe normed."""
        after = self._target.family.after
        if after is None:
            return self._linears(layer, group, inner_NX, add_to=x_NE)
        return x_NE + self._normed(layer, after[group == "down"], self._linears(layer, group, inner_NX))

    def _normed(self, owner: nn.Module, name: str, x: Tensor) -> Tensor:
        """Return the module's RMSNorm of that name of its input; the input itself if there is none."""
        return _norm(getattr(owner, name), x, self._target.family.norm_offset) if name else x

    def _turned(self, qkv_NXD: Tensor, heads: Sequence[int]) -> tuple[Tensor, ...]:
        """Return queries and keys after RoPE (if the layer knows positions), and values."""
        rope = self._ropes[self._layer - 1]
        if rope is None:
            return qkv_NXD.split(tuple(heads), 1)
        cos_ND, sin_ND = rope
        neighbours = self._target.family.neighbours
        if cos_ND.shape[-1] == qkv_NXD.shape[-1] and not neighbours:
            half = sin_ND.shape[-1] // 2
            # the sign that the swapped halves need
            signed_ND = torch.cat((-sin_ND[:, :half], sin_ND[:, half:]), -1)
            return rotated(qkv_NXD, cos_ND[:, None], signed_ND[:, None], heads)
        q_NHD, k_NGD, *v_NGD = qkv_NXD.split(tuple(heads), 1)
        q_NHD, k_NGD = (rotated_part(part, rope, neighbours=neighbours) for part in (q_NHD, k_NGD))
        return q_NHD, k_NGD, *v_NGD

    def _linears(
        self,
        layer: Any,
        group: str,
        x_NE: Tensor,
        *,
        names: Sequence[str] = (),
        add_to: Tensor | None = None,
    ) -> Tensor:
        """Return concatenated outputs of a layer's linears of one input, with LoRA and residual stream."""
        modules = [layer.get_submodule(name) for name in names or GROUPS[group]]
        weights = _joined([module.weight for module in modules], x_NE.dtype)
        biases = _joined([module.bias for module in modules if module.bias is not None], x_NE.dtype)
        bias_O = (biases[0] if len(biases) == 1 else torch.cat(biases)) if biases else None
        place = (self._layer - 1, group)
        a_RE, b_OR = self._lora.get(place, (None, None))
        note = (self._uses, place)
        return lora_linears(x_NE, weights, bias_O, a_RE, b_OR, add_to=add_to, note=note)


def _between(target: Target, x: Tensor, below: int | None, above: int | None) -> Tensor:
    """Return the same tensor; backward of a sharded target gathers the layer below, frees the one above."""
    return x if target.shards is None else target.shards.regather(x, enter=below, leave=above)


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors as one if they are adjacent in memory, else as they are."""
    whole = lying_together(parts) if len(parts) > 1 else None
    return [part.to(dtype) for part in (parts if whole is None else (whole,))]


def _norm(module: Any, x: Tensor, offset: int) -> Tensor:
    """Apply the target's RMSNorm in fp32 or wider inside: of the last dim, or of all heads together (Olmo 3).

    Args:
        module: the norm.
        x: its input.
        offset: number that is added to the stored weights; the product with them is then rounded once.
    """
    weight, eps = module.weight, getattr(module, "variance_epsilon", None)
    wide = torch.promote_types(x.dtype, torch.float32) if offset else x.dtype
    rows = x if x.shape[-1] == len(weight) else x.flatten(1)
    weight = weight.to(wide) + offset if offset else weight.to(wide)
    normed = rms_norm(rows.to(wide), weight.shape, weight, module.eps if eps is None else eps)
    return normed.to(x.dtype).view(x.shape)


def _ropes(target: Target, pos_N: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor] | None]:
    """Return cos and sin of each layer, each [N, R]; None: the layer knows no positions."""
    ropes = [target.info.layer(index).rope for index in range(target.info.n_layers)]
    found: list[tuple[Tensor, Tensor] | None] = []
    for index, rope in enumerate(ropes):
        if not rope or rope in ropes[:index]:
            found.append(found[ropes.index(rope)] if rope else None)
            continue
        cos_BND, sin_BND = layer_rope(target, index, pos_N[None], dtype)
        found.append((cos_BND[0], sin_BND[0]))
    return found


def window_attention(
    q_NHD: Tensor,
    own_k_NGD: Tensor,
    own_v_NGD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    window: int,
) -> Tensor:
    """Return out_NHD, the attention of suffix tokens over the last `window` positions, their own included.

    Differentiable in q, own_k and own_v; the prefix is constant. See `suffix_attention`.
    """
    outs = []
    for span in spans:
        own, stop = slice(*span.rows), span.keys[1]
        start = max(span.keys[0], stop - window + 1)
        k_XGD = torch.cat((k_BTGD[span.seq, start:stop].detach().to(own_k_NGD.dtype), own_k_NGD[own]))
        v_XGD = torch.cat((v_BTGD[span.seq, start:stop].detach().to(own_v_NGD.dtype), own_v_NGD[own]))
        at_X = torch.arange(len(k_XGD), device=q_NHD.device)
        apart_NX = at_X[stop - start :, None] - at_X
        # [N, X, D] -> [1, X, N, D]
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHD[own], k_XGD, v_XGD))
        seen_NX = (apart_NX >= 0) & (apart_NX < window)
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen_NX, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def rotated(qkv_NXD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, heads: Sequence[int]) -> tuple[Tensor, ...]:
    """Apply RoPE to concatenated queries and keys, halves paired as in Hugging Face's Llama.

    Args:
        qkv_NXD: queries, keys and others that are not rotated (values).
        cos_N1D: cosines.
        sin_N1D: sines, those of the first half negated.
        heads: number of heads of each.

    Returns:
        Queries, keys and the others.
    """
    return _Rotated.apply(qkv_NXD, cos_N1D, sin_N1D, tuple(heads))


class _Rotated(torch.autograd.Function):
    """Autograd function of `rotated`; its backward rotates by the opposite angle."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.turned = heads[0] + heads[1]
        qk, *rest = qkv.split((ctx.turned, *heads[2:]), 1)
        turned = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)
        return (turned[:, : heads[0]], turned[:, heads[0] :], *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        d = torch.cat(grads, 1)
        d_qk = d[:, : ctx.turned]
        other = d_qk.roll(d.shape[-1] // 2, -1)
        # the inverse rotation is the transpose: the same cos, the negated sin
        d_qk.mul_(cos).addcmul_(other, sin, value=-1)
        return d, None, None, None
