"""Sums a loss over chunks of a packed sequence, so that the activations of only one chunk exist at a time.

The gradient is computed chunk by chunk. This is exact if the chunks share nothing that needs a gradient
except the parameters and tensors computed from the parameters alone (`SharedRows`): the gradient of the sum
is then the sum of the gradients. To a caller the result is one ordinary differentiable scalar, so automatic
optimisation, gradient accumulation, DDP and ZeRO-1/2 need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedRows:
    """Tensors that every chunk reads, such as keys and values, computed from the parameters in blocks.

    The whole tensors are stored without the activations that produced them, and so is the gradient that the
    chunks accumulate on them. The chunks see them as leaves; at the end each block is recomputed with
    gradients enabled.

    Args:
        make: block number -> the block's tensors, which are concatenated over the blocks along dim 0. Called
            twice for each block and must return the same values both times.
        blocks: number of blocks, at least 1.
    """

    make: Callable[[int], Sequence[Tensor]]
    blocks: int

    def joined(self) -> list[Tensor]:
        """Return the tensors concatenated over all blocks, with a graph if gradients are enabled."""
        parts = [tuple(self.make(block)) for block in range(self.blocks)]
        return [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def chunked_sum(
    step: Callable[..., Tensor],
    chunks: int,
    parameters: Iterable[Tensor],
    *,
    shared: SharedRows | None = None,
) -> Tensor:
    """Return the sum of `step(0) ... step(chunks - 1)`, with the activations of one chunk alive at a time.

    Forward runs every chunk under autograd, takes its gradients at once and accumulates them in fp32 (fp64 in
    fp64); backward returns these sums times the incoming gradient. The chunks use the caller's autocast.
    With `shared` there are three phases: the shared tensors are computed without a graph; the chunks read
    them as leaves, and the gradients on these leaves are accumulated in fp32 too; each block is then
    recomputed with a graph and its slice of those gradients is propagated to the parameters.

    Args:
        step: chunk number -> scalar loss of that chunk, computed from `parameters`; with `shared` the
            concatenated tensors follow the number. Called once for each chunk, in order; it may return a
            scalar without a graph.
        chunks: number of chunks.
        parameters: leaves that receive a gradient; those without `requires_grad` are skipped. Anything else
            that the steps differentiate through gets no gradient.
        shared: tensors computed from the parameters that several chunks read; None: there are none.

    Returns:
        A scalar, fp32 (fp64 if a chunk is), with a gradient if any parameter requires one.

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
    """Autograd function that computes all gradients in forward, so that backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, step: Callable[..., Tensor], chunks: int, shared: SharedRows | None, *leaves: Tensor
    ) -> Tensor:
        sums: list[Tensor | None] = [None] * len(leaves)
        # Phase 1: the shared tensors as leaves, without the graph that produced them.
        made = [part.detach().requires_grad_() for part in shared.joined()] if shared and chunks else []
        # dL/d(made), summed over the chunks
        cotangents: list[Tensor | None] = [None] * len(made)
        totals = []
        # Phase 2: each chunk's graph is freed as soon as its gradients are taken.
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
            # Phase 3: chain rule through the shared tensors, one block at a time.
            _back_to_parameters(shared, made, cotangents, leaves, sums)
        ctx.save_for_backward(*sums)
        ctx.dtypes = [leaf.dtype for leaf in leaves]
        return _total(totals, leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (
            # Linear in the incoming gradient: the stored sums are exact for any scale.
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
    """Recompute each block with a graph and add the parameters' gradients from its cotangents to `sums`."""
    used = [i for i, cotangent in enumerate(cotangents) if cotangent is not None]
    # frees the shared tensors; each block is computed again below
    made.clear()
    at = [0] * len(cotangents)  # first row of the current block, for each shared tensor
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
            # Copied: autograd may return one tensor for several leaves, and add_ would change all.
            sums[i] = grad.to(wide, copy=True) if known is None else known.add_(grad)


def _total(losses: list[Tensor], leaves: Sequence[Tensor]) -> Tensor:
    if losses:
        return torch.stack([x.to(torch.promote_types(x.dtype, torch.float32)) for x in losses]).sum()
    return torch.zeros((), device=leaves[0].device if leaves else None)
