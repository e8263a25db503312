"""Linears with LoRA and RoPE over a few rows, each one autograd node: what a suffix costs is launches.

Weights of the target are frozen and get no gradient; those of the LoRA do. Without gradients the same code
runs, and nothing is saved.
Shapes: N rows, E inputs, O outputs of one linear, R LoRA rank, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
