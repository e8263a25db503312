"""Frozen linears with LoRA for few inputs, where kernel launches cost more than arithmetic.

Linears of one input are one autograd node and, if their weights are adjacent in memory (`Target.fuse`), one
product. The gradients of LoRA are computed when backward has passed all layers, for several layers at once.

Shapes: N inputs, L layers, E inputs of a linear, O outputs of linears of one input, concatenated, R ranks of
their LoRA, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Place: TypeAlias = tuple[int, str]
"""A layer, and the key of linears that share an input in it."""

_TOGETHER = 2**25
"""Most elements of several layers' outputs that are stacked for the gradients of their LoRA."""


@dataclass(frozen=True)
class Lora:
    """LoRA of linears of one input, in the layers where they are alike: it adds `(x A^T) B^T` to the outputs.

    Args:
        key: key of the linears.
        layers: those layers.
        a_LRE: the A of the linears that have LoRA, concatenated along R.
        b_LOR: the B of each, in its linear's outputs and its A's ranks, with alpha / rank in it; 0 elsewhere.
    """

    key: str
    layers: Sequence[int]
    a_LRE: Tensor
    b_LOR: Tensor


@dataclass(frozen=True)
class Use:
    """Tensors from which the gradients of a layer's LoRA are computed, known once backward has passed it.

    Args:
        place: the linears.
        x_NE: their input.
        low_NR: its product with A.
        d_out_NO: gradient of their outputs.
        d_low_NR: gradient of `low_NR`.
    """

    place: Place
    x_NE: Tensor
    low_NR: Tensor
    d_out_NO: Tensor
    d_low_NR: Tensor


def unstacked(stacks: Sequence[Lora], uses: list[Use]) -> dict[Place, tuple[Tensor, Tensor]]:
    """Return A and B of each place; their gradients are computed from `uses`, which backward fills."""
    if not stacks:
        return {}
    places = [[(layer, one.key) for layer in one.layers] for one in stacks]
    pieces = iter(_Unstacked.apply(uses, places, *(x for one in stacks for x in (one.a_LRE, one.b_LOR))))
    found: dict[Place, tuple[Tensor, Tensor]] = {}
    for some in places:
        a = [next(pieces) for _ in some]
        found |= {place: (a_RE, next(pieces)) for place, a_RE in zip(some, a, strict=True)}
    return found


def lora_linears(
    x_NE: Tensor,
    weights: Sequence[Tensor],
    bias_O: Tensor | None,
    a_RE: Tensor | None,
    b_OR: Tensor | None,
    *,
    add_to: Tensor | None,
    note: tuple[list[Use], Place],
) -> Tensor:
    """Compute linears of one input, outputs concatenated: `add_to + x W^T + bias + (x A^T) B^T`.

    Args:
        x_NE: input.
        weights: frozen weights, concatenated along the outputs.
        bias_O: frozen, or None.
        a_RE: see `unstacked`; None: there is no LoRA.
        b_OR: likewise.
        add_to: residual stream that is added to the output, if there is only one weight.
        note: list to which backward appends a `Use` of this place; it computes no gradients of A and B
            itself.
    """
    return _Linears.apply(x_NE, add_to, a_RE, b_OR, bias_O, note, *weights)


class _Linears(torch.autograd.Function):
    """Autograd function of `lora_linears`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        add_to: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        bias: Tensor | None,
        note: tuple[list[Use], Place],
        *weights: Tensor,
    ) -> Tensor:
        if add_to is not None:
            out = torch.addmm(add_to, x, weights[0].t())
        elif len(weights) == 1:
            out = torch.mm(x, weights[0].t())
        else:
            out = torch.cat([torch.mm(x, weight.t()) for weight in weights], 1)
        if bias is not None:
            out += bias
        low = None
        if a is not None and b is not None:
            low = torch.mm(x, a.t())
            out.addmm_(low, b.t())
        ctx.save_for_backward(x, a, b, low, *weights)
        ctx.note, ctx.residual = note, add_to is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, a, b, low, *weights = ctx.saved_tensors
        (d_out,) = grads
        parts = [d_out] if len(weights) == 1 else d_out.split([len(weight) for weight in weights], 1)
        d_x = torch.mm(parts[0], weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            d_x.addmm_(part, weight)
        if a is not None:
            d_low = torch.mm(d_out, b)
            d_x.addmm_(d_low, a)
            if any(ctx.needs_input_grad[2:4]):
                uses, place = ctx.note
                # detached: x refers to nodes that refer to this list, a cycle that would never be freed
                uses.append(Use(place, x.detach(), low, d_out, d_low))
        return (d_x, d_out if ctx.residual else None, *[None] * (4 + len(weights)))


class _Unstacked(torch.autograd.Function):
    """Splits stacks by layer: those of a stack's A, then those of its B, then the next stack's."""

    @staticmethod
    def forward(ctx: Any, uses: list[Use], places: list[list[Place]], *stacks: Tensor) -> tuple[Tensor, ...]:
        ctx.uses, ctx.places = uses, places
        ctx.set_materialize_grads(False)
        return tuple(piece for stack in stacks for piece in stack.unbind())

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        uses = {use.place: use for use in ctx.uses}
        ctx.uses.clear()
        grads: list[Tensor | None] = []
        for places in ctx.places:
            found = [uses.pop(place, None) for place in places]
            grads += _gradients([use for use in found if use], [use is not None for use in found])
        return None, None, *grads


def _gradients(uses: Sequence[Use], passed: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of a stack's A and B: 0 for layers skipped in backward, None if all were."""
    if not uses:
        return [None, None]
    most = max(1, _TOGETHER // uses[0].d_out_NO.numel())
    pairs = [_products(uses[i : i + most]) for i in range(0, len(uses), most)]
    return [_spread(side, passed) for side in zip(*pairs, strict=True)]


def _spread(parts: Sequence[Tensor], passed: Sequence[bool]) -> Tensor:
    """Return the gradients of all layers, with zeros for those that backward skipped."""
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if all(passed):
        return whole
    zero, given = torch.zeros_like(whole[0]), iter(whole)
    return torch.stack([next(given) if one else zero for one in passed])


def _products(uses: Sequence[Use]) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B of some layers."""
    names = ("x_NE", "low_NR", "d_out_NO", "d_low_NR")
    x, low, d_out, d_low = (torch.stack([getattr(use, name) for use in uses]) for name in names)
    # [L, R, N] x [L, N, E] and [L, O, N] x [L, N, R]
    return torch.bmm(d_low.mT, x), torch.bmm(d_out.mT, low)
