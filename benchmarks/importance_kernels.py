"""Milliseconds per layer of the importance kernels, their PyTorch references, and the hardware's bound.

Shapes: N observing queries, T prompt keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks import replay
from benchmarks.operators import RandomInputs, Shape, bound
from longtrain.bench import clock
from longtrain.bench.suites import Auto, Bench, Context, Dtype, Row, shape_keys
from longtrain.costs.model import Sizes
from longtrain.kernels import importance
from longtrain.kernels.importance import Span, reference
from longtrain.settings import NOT_EMPTY, Count, Tokens

COLUMNS = {
    "rows": "rows",
    "keys": "keys",
    "call": "call",
    **clock.spread_columns("kernel ms", "kernel_ms"),
    "torch ms": "torch_ms.median",
    "torch / kernel": "speed",
    "bound ms": "bound_ms",
    "of the bound": "share_of_bound",
    "difference": "relative_difference",
    "failed": "failed",
}

PRODUCTS = {"suffix_lse": 1, "importance": 1, "suffix_attention": 2, "suffix_attention backward": 4}
"""Call -> number of products of size queries x keys x head dim that it needs."""

MOST_SUFFIX_ROWS = 128
"""Up to so many queries are lookahead tokens (`suffix_attention`); more are a response (scored only)."""

WARMUP = 3
"""Number of uncounted calls."""


@dataclass(frozen=True)
class ImportanceSettings:
    """The keys of `suite=importance`.

    Args:
        shape: the model whose heads are measured.
        dtype: dtype of queries, keys and values.
        cells: observing queries and prompt keys of each measurement.
        repeats: timed calls of each kernel.
    """

    shape: Shape
    dtype: Dtype
    cells: Annotated[
        tuple[tuple[Tokens, Tokens], ...],
        NOT_EMPTY,
        Auto([[32, "8k"], [32, "32k"], [32, "128k"], [512, "16k"]], [[8, 256], [32, 512]]),
    ]
    repeats: Count = 30


Outputs = Callable[[int], tuple[Tensor, ...]]
"""Function that runs an operator on the i-th copy of the keys."""


@dataclass(frozen=True)
class ObservedPrompt:
    """Random inputs for all calls of one size: observing queries after a prompt, and output gradients."""

    q_NHD: Tensor
    own_k_NGD: Tensor
    own_v_NGD: Tensor
    k_BTGD: list[Tensor]
    v_BTGD: list[Tensor]
    grad_out_NHD: Tensor
    grad_s_BHT: Tensor
    spans: list[Span]
    scale: float


def measure(
    context: Context,
    dtype: torch.dtype,
    info: Sizes,
    cells: Sequence[tuple[int, int]],
    *,
    repeats: int,
) -> Iterator[Row]:
    """Yield a row for each cell and call; one that does not fit in memory has `failed`.

    Args:
        context: the suite's context.
        dtype: dtype of queries, keys and values.
        info: the model, for its heads.
        cells: (queries, keys) pairs.
        repeats: counted calls.
    """
    H, G, D = info.n_heads, info.n_kv_heads, info.head_dim
    inputs = RandomInputs(context.device, dtype)
    for N, T in cells:
        prompt = cache(partial(_prompt, inputs, info, N, T))
        for call in PRODUCTS if N <= MOST_SUFFIX_ROWS else ("suffix_lse", "importance"):
            matrices = 2 if call.startswith("suffix_attention") else 1
            scores = 0 if call == "suffix_lse" else 4 * H * T
            moved = matrices * G * T * D * dtype.itemsize + scores
            flops = 2 * PRODUCTS[call] * H * N * T * D
            limits = {**bound(moved, flops, context), "bound_bytes": moved, "bound_flops": flops}
            about = {"rows": N, "keys": T, "call": call, "heads": [H, G], **limits}
            yield clock.filled(about, _metrics(call, about, prompt, context.device, repeats), context.device)


def _metrics(
    call: str, about: Row, prompt: Callable[[], ObservedPrompt], device: torch.device, repeats: int
) -> Iterator[Row]:
    """Time a kernel and its PyTorch reference, and measure their distance."""
    fast, plain = _work(call, importance, prompt()), _work(call, reference, prompt())
    pairs = zip(fast(0), plain(0), strict=True)
    gap = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)
    kernel_ms = replay.cold(fast, device, warmup=WARMUP, repeats=repeats)
    torch_ms = replay.cold(plain, device, warmup=1, repeats=max(3, repeats // 5))
    yield {
        "kernel_ms": kernel_ms,
        "torch_ms": torch_ms,
        "speed": torch_ms["median"] / kernel_ms["median"],
        "relative_difference": gap,
        "share_of_bound": about["bound_ms"] / kernel_ms["median"],
    }


def _work(call: str, ops: Any, x: ObservedPrompt) -> Outputs:
    """Return a call of one implementation."""
    copies, how = len(x.k_BTGD), dict[str, Any](scale=x.scale)
    if call == "suffix_lse":
        return lambda i: (ops.suffix_lse(x.q_NHD, x.own_k_NGD, x.k_BTGD[i % copies], x.spans, **how),)
    if call == "importance":
        lse_NH = importance.suffix_lse(x.q_NHD, x.own_k_NGD, x.k_BTGD[0], x.spans, **how)
        return lambda i: (ops.importance(x.q_NHD, lse_NH, x.k_BTGD[i % copies], x.spans, **how),)
    leaves = [t.detach().requires_grad_("backward" in call) for t in (x.q_NHD, x.own_k_NGD, x.own_v_NGD)]

    def forward(i: int) -> tuple[Tensor, ...]:
        return ops.suffix_attention(*leaves, x.k_BTGD[i % copies], x.v_BTGD[i % copies], x.spans, **how)

    if "backward" not in call:
        return forward
    graphs = [forward(i) for i in range(copies)]

    def backward(i: int) -> tuple[Tensor, ...]:
        grads = (x.grad_out_NHD, x.grad_s_BHT)
        return torch.autograd.grad(graphs[i % copies], leaves, grads, retain_graph=True)

    return backward


def _prompt(inputs: RandomInputs, info: Sizes, n_rows: int, n_keys: int) -> ObservedPrompt:
    inputs.restart()
    H, G, D = info.n_heads, info.n_kv_heads, info.head_dim
    size = 2 * n_keys * G * D * inputs.dtype.itemsize
    copies = replay.copies_of(size, inputs.device)
    # memory layout of a cache: heads before positions
    keys, values = ([inputs.normal(1, G, n_keys, D).transpose(1, 2) for _ in range(copies)] for _ in range(2))
    return ObservedPrompt(
        inputs.normal(n_rows, H, D),
        inputs.normal(n_rows, G, D),
        inputs.normal(n_rows, G, D),
        keys,
        values,
        inputs.normal(n_rows, H, D),
        inputs.normal(1, H, n_keys).float(),
        [Span((0, n_rows), 0, (0, n_keys))],
        D**-0.5,
    )


def run(settings: ImportanceSettings, context: Context) -> Iterator[Row]:
    """Measure the importance kernels at every cell."""
    sizes = Sizes.of_keys(shape_keys(settings.shape))
    dtype: torch.dtype = getattr(torch, settings.dtype)
    yield from measure(context, dtype, sizes, settings.cells, repeats=settings.repeats)


BENCH = Bench(settings=ImportanceSettings, run=run, columns=COLUMNS)
