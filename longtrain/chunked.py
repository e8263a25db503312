"""Sums whose gradient is found chunk by chunk, so that activations of one chunk only exist at a time.

Exact where the chunks share nothing that needs a gradient but the parameters, and rows that are functions
of the parameters alone (`SharedRows`): then the gradient of the sum is the sum of the gradients. To the
outside it is one ordinary differentiable scalar: automatic optimization, gradient accumulation, DDP and
ZeRO-1/2 need to know nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedRows:
    """Tensors that every chunk may read, made block by block from the parameters: a layer's keys and values.

    They exist whole, without the activations that they came from, and so does the gradient that the chunks
    leave on them: the chunks read them as leaves, and each block is made again at the end, with a gradient.

    Args:
        make: block number -> the block's tensors; those of all blocks are put one after another along their
            first dim. Runs twice for each block, and must give the same both times.
        blocks: how many, at least 1.
    """

    make: Callable[[int], Sequence[Tensor]]
    blocks: int

    def joined(self) -> list[Tensor]:
        """The tensors of all blocks one after another, with a gradient where the caller's context has one."""
        parts = [tuple(self.make(block)) for block in range(self.blocks)]
        return [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def chunked_sum(
    step: Callable[..., Tensor],
    chunks: int,
    parameters: Iterable[Tensor],
    *,
    shared: SharedRows | None = None,
) -> Tensor:
    """The sum of `step(0) ... step(chunks - 1)`, with the activations of one chunk alive at a time.

    Forward runs every chunk under autograd, takes its gradients at once and adds them up in fp32 (fp64 in
    fp64); backward hands the sums on, times the incoming gradient. Autocast is what it is around the call.

    With `shared` there are three phases: its rows are made without a gradient; the chunks read them, and what
    flows back to them is summed in fp32 too; each of their blocks is made again and takes its part of that
    sum back to the parameters.

    Args:
        step: chunk number -> scalar loss of that chunk, built from `parameters`; with `shared` its joined
            tensors follow the number. Runs once for each chunk, in order; a chunk may return a scalar without
            a gradient.
        chunks: how many.
        parameters: leaves that receive a gradient; those that do not require one are passed over. Anything
            else that the steps differentiate through gets none.
        shared: rows made from the parameters that several chunks read; None: there are none.

    Returns: scalar, fp32 (fp64 if a chunk is), with a gradient if any parameter requires one.
    Source: the decomposition is this project's; it is exact for a one-layer draft, whose keys and values are
        functions of single tokens.
    """
    leaves = [p for p in parameters if p.requires_grad]
    if torch.is_grad_enabled() and leaves:
        return _ChunkedSum.apply(step, chunks, shared, *leaves)
    with torch.no_grad():
        made = shared.joined() if shared is not None and chunks else []
        return _total([step(i, *made).detach() for i in range(chunks)], leaves)


class _ChunkedSum(torch.autograd.Function):
    """Gradients in forward; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, step: Callable[..., Tensor], chunks: int, shared: SharedRows | None, *leaves: Tensor
    ) -> Tensor:
        sums: list[Tensor | None] = [None] * len(leaves)
        made = [part.detach().requires_grad_() for part in shared.joined()] if shared and chunks else []
        cotangents: list[Tensor | None] = [None] * len(made)
        totals = []
        for i in range(chunks):
            with torch.enable_grad():
                loss = step(i, *made)
            totals.append(loss.detach())
            if loss.requires_grad:
                grads = torch.autograd.grad(loss, (*leaves, *made), allow_unused=True)
                _add(sums, grads[: len(leaves)])
                _add(cotangents, grads[len(leaves) :])
                del grads
            del loss
        if shared is not None:
            _back_to_parameters(shared, made, cotangents, leaves, sums)
        ctx.save_for_backward(*sums)
        ctx.dtypes = [leaf.dtype for leaf in leaves]
        return _total(totals, leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if g is None else (g * grads[0].to(g.dtype)).to(dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return None, None, None, *scaled


def _back_to_parameters(
    shared: SharedRows,
    made: list[Tensor],
    cotangents: list[Tensor | None],
    leaves: Sequence[Tensor],
    sums: list[Tensor | None],
) -> None:
    """Make each block again, with a gradient, and add what its rows' cotangents leave on the parameters."""
    used = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
    made.clear()
    at = [0] * len(cotangents)
    for block in range(shared.blocks if used else 0):
        with torch.enable_grad():
            parts = tuple(shared.make(block))
        pairs = []
        for i, part in enumerate(parts):
            cotangent, start = cotangents[i], at[i]
            at[i] += len(part)
            if cotangent is not None and part.requires_grad:
                pairs.append((part, cotangent[start : at[i]].to(part.dtype)))
        if pairs:
            outputs, incoming = zip(*pairs, strict=True)
            _add(sums, torch.autograd.grad(outputs, leaves, incoming, allow_unused=True))


def _add(sums: list[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    for i, grad in enumerate(grads):
        if grad is not None:
            known, wide = sums[i], torch.promote_types(grad.dtype, torch.float32)
            # A copy: autograd may hand out one tensor for several leaves.
            sums[i] = grad.to(wide, copy=True) if known is None else known.add_(grad)


def _total(losses: list[Tensor], leaves: Sequence[Tensor]) -> Tensor:
    if losses:
        return torch.stack([x.to(torch.promote_types(x.dtype, torch.float32)) for x in losses]).sum()
    return torch.zeros((), device=leaves[0].device if leaves else None)
