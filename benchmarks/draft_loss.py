"""Milliseconds of a draft's loss with its gradients, beside plain torch and `torch.compile`.

Each computes the teacher's logits, the logits of every pass, the loss of every pass and token, and the
gradients of the passes' hidden states and of the draft's head. The plain forms are autograd on blocks of
tokens, in fp32 behind the logits; the compiled one compiles the loss of a block.
Shapes: J passes, W tokens, B tokens of a block, E hidden dim, V vocabulary, K tokens of the draft's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from benchmarks.operators import RandomInputs, Shape, bound, distance
from longtrain.bench import clock
from longtrain.bench.suites import Auto, Bench, Context, Dtype, Row, shape_keys
from longtrain.costs.model import Sizes
from longtrain.losses.draft import DRAFT_OBJECTIVES, DraftTeacher, fused_draft_loss
from longtrain.settings import NOT_EMPTY, Count, OneOf, Tokens

COLUMNS = {
    "objective": "objective",
    "tokens": "tokens",
    **clock.spread_columns("ms", "fused_ms"),
    "torch ms": "torch_ms.median",
    "compiled ms": "compiled_ms.median",
    "torch / ours": "over_torch",
    "compiled / ours": "over_compiled",
    "bound ms": "bound_ms",
    "peak GiB": "fused_peak_gib",
    "torch peak GiB": "torch_peak_gib",
    "difference": "relative_difference",
    "failed": "failed",
}
KL_DECAY = 3.0
BLOCK = 2048
"""Tokens whose logits exist at once in the plain forms."""
WARMUP = 2
Objective = Annotated[str, OneOf(*DRAFT_OBJECTIVES)]


@dataclass(frozen=True)
class DraftLossSettings:
    """The keys of `draft_loss`.

    Args:
        shape: the model whose hidden size and vocabulary are measured.
        dtype: dtype of hidden states and heads.
        tokens: tokens of a training step.
        passes: passes of the draft.
        draft_vocab_size: tokens of the draft's vocabulary.
        objectives: the losses.
        compiled: True to measure `torch.compile` too.
        repeats: timed steps.
    """

    shape: Shape
    dtype: Dtype
    tokens: Annotated[Tokens, Auto("16k", 64)]
    passes: Count = 5
    draft_vocab_size: Annotated[Count, Auto(16384, 64)] = 16384
    objectives: Annotated[tuple[Annotated[str, OneOf(*DRAFT_OBJECTIVES)], ...], NOT_EMPTY] = (
        "kl",
        "lk_hybrid",
    )
    compiled: bool = True
    repeats: Count = 20


class Inputs(NamedTuple):
    """Random inputs of a step.

    Args:
        passes: the draft's hidden states of each pass, [W, E]; they require a gradient.
        head_KE: the draft's head; it requires a gradient.
        teacher: hidden states and head of the teacher.
    """

    passes: list[Tensor]
    head_KE: Tensor
    teacher: DraftTeacher

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        return [self.head_KE, *self.passes]


def run(settings: DraftLossSettings, context: Context) -> Iterator[Row]:
    """Yield a row for each objective."""
    sizes = Sizes.of_keys(shape_keys(settings.shape))
    dtype: torch.dtype = getattr(torch, settings.dtype)
    W, J, V, E = settings.tokens, settings.passes, sizes.vocab_size, sizes.hidden_size
    K = min(settings.draft_vocab_size, V)
    draw = RandomInputs(context.device, dtype)
    draw.restart()
    passes = [draw.normal(W, E).requires_grad_() for _ in range(J)]
    head_KE = (draw.normal(K, E) * E**-0.5).requires_grad_()
    ids_K = torch.randperm(V, device=context.device)[:K]
    inputs = Inputs(passes, head_KE, DraftTeacher(draw.normal(W, E), draw.normal(V, E) * E**-0.5, ids_K))
    flops = 2 * W * E * (V + 3 * J * K)  # the teacher's product, and three of each pass
    moved = dtype.itemsize * (E * (V + 2 * K) + W * E * (1 + 2 * J))
    about = {"tokens": W, "passes": J, "hidden": E, "vocab": V, "draft_vocab": K}
    for objective in settings.objectives:
        row = about | {"objective": objective} | bound(moved, flops, context)
        yield clock.filled(row, measure(inputs, objective, context.device, settings), context.device)


def measure(
    inputs: Inputs, objective: str, device: torch.device, settings: DraftLossSettings
) -> Iterator[Row]:
    """Time the fused loss and the plain forms, and measure how far their gradients are apart."""

    def timed(name: str, step: Callable[[], None]) -> Row:
        timings = clock.repeated(step, device, warmup=WARMUP, repeats=settings.repeats)
        return {
            f"{name}_ms": clock.spread([one.wall_ms for one in timings]),
            f"{name}_peak_gib": clock.gib(timings[-1].peak_bytes),
        }

    fused, plain = partial(fused_step, inputs, objective), partial(plain_step, inputs, objective, block_loss)
    gradients = []
    for step in (fused, plain):
        step()
        gradients.append([leaf.grad for leaf in inputs.leaves])
    yield {"relative_difference": max(distance(a, b) for a, b in zip(*gradients, strict=True))}
    ours = timed("fused", fused)
    yield ours
    others = {"torch": plain}
    if settings.compiled:
        others["compiled"] = partial(plain_step, inputs, objective, torch.compile(block_loss))
    for name, step in others.items():
        found = timed(name, step)
        yield {**found, f"over_{name}": found[f"{name}_ms"]["median"] / ours["fused_ms"]["median"]}


def fused_step(inputs: Inputs, objective: str) -> None:
    """Compute the loss and its gradients by `fused_draft_loss`."""
    clear(inputs)
    W, J = len(inputs.teacher.hidden_WE), len(inputs.passes)
    device = inputs.head_KE.device
    row_JW = torch.arange(W, device=device).expand(J, W)
    weight_JW = torch.full((J, W), 1 / W, device=device)
    loss = fused_draft_loss(
        inputs.passes,
        inputs.head_KE,
        inputs.teacher,
        row_JW,
        weight_JW,
        objective=objective,
        kl_decay=KL_DECAY,
    )
    loss[0].backward()


def plain_step(inputs: Inputs, objective: str, loss: Callable[..., Tensor]) -> None:
    """Compute the loss and its gradients by autograd, block by block.

    Args:
        inputs: the inputs.
        objective: the objective.
        loss: `block_loss`, or a compiled copy.
    """
    clear(inputs)
    hidden_WE, head_VE, ids_K = inputs.teacher
    W = len(hidden_WE)
    for a in range(0, W, BLOCK):
        part = slice(a, a + BLOCK)
        with torch.no_grad():
            teacher_BV = hidden_WE[part] @ head_VE.t()
        total = sum(
            loss(one_WE[part] @ inputs.head_KE.t(), teacher_BV, ids_K, objective) for one_WE in inputs.passes
        )
        (total / W).backward()  # type: ignore[union-attr]


def block_loss(logit_BK: Tensor, teacher_BV: Tensor, ids_K: Tensor, objective: str) -> Tensor:
    """Return the sum of a block's losses, in fp32 behind the logits."""
    logp_BK = log_softmax(teacher_BV.float(), -1)[:, ids_K]
    logn_BK = logp_BK - logp_BK.logsumexp(-1, keepdim=True)
    logq_BK = log_softmax(logit_BK.float(), -1)
    kl_B = (logn_BK.exp() * (logn_BK - logq_BK)).sum(-1)
    if objective == "kl":
        return kl_B.sum()
    accept_B = torch.minimum(logp_BK.exp(), logq_BK.exp()).sum(-1)
    if objective == "lk":
        return -accept_B.log().sum()
    if objective == "tv":
        return (1 - accept_B).sum()
    mix_B = torch.exp(-KL_DECAY * accept_B.detach())
    return (mix_B * kl_B + (1 - mix_B) * (1 - accept_B)).sum()


def clear(inputs: Inputs) -> None:
    """Discard the gradients of the step before."""
    for leaf in inputs.leaves:
        leaf.grad = None


BENCH = Bench(settings=DraftLossSettings, run=run, columns=COLUMNS)
