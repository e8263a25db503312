"""Sums whose gradient is found chunk by chunk, so that activations of one chunk only exist at a time.

Exact where the chunks share nothing that needs a gradient but the parameters: then the gradient of the sum
is the sum of the gradients. To the outside it is one ordinary differentiable scalar: automatic optimization,
gradient accumulation, DDP and ZeRO-1/2 need to know nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def chunked_sum(step: Callable[[int], Tensor], chunks: int, parameters: Iterable[Tensor]) -> Tensor:
    """The sum of `step(0) ... step(chunks - 1)`, with the activations of one chunk alive at a time.

    Forward runs every chunk under autograd, takes its gradients at once and adds them up in fp32 (fp64 in
    fp64); backward hands the sums on, times the incoming gradient. Autocast is what it is around the call.

    Args:
        step: chunk number -> scalar loss of that chunk, built from `parameters`. Runs once for each chunk,
            in order; a chunk may return a scalar without a gradient.
        chunks: how many.
        parameters: leaves that receive a gradient; those that do not require one are passed over. Anything
            else that the steps differentiate through gets none.

    Returns: scalar, fp32 (fp64 if a chunk is), with a gradient if any parameter requires one.
    Source: the decomposition is this project's; it is exact for a one-layer draft, whose keys and values are
        functions of single tokens.
    """
    leaves = [p for p in parameters if p.requires_grad]
    if not torch.is_grad_enabled() or not leaves:
        return _total([step(i).detach() for i in range(chunks)], leaves)
    return _ChunkedSum.apply(step, chunks, *leaves)


class _ChunkedSum(torch.autograd.Function):
    """Gradients in forward; backward scales them."""

    @staticmethod
    def forward(ctx: Any, step: Callable[[int], Tensor], chunks: int, *leaves: Tensor) -> Tensor:
        sums: list[Tensor | None] = [None] * len(leaves)
        totals = []
        for i in range(chunks):
            with torch.enable_grad():
                loss = step(i)
            totals.append(loss.detach())
            if loss.requires_grad:
                _add(sums, torch.autograd.grad(loss, leaves, allow_unused=True))
            del loss
        ctx.save_for_backward(*sums)
        ctx.dtypes = [leaf.dtype for leaf in leaves]
        return _total(totals, leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            None if g is None else (g * grads[0].to(g.dtype)).to(dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return None, None, *scaled


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
