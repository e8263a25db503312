"""Milliseconds a layer of the importance kernels, beside their torch twins and what the hardware allows.

The bound of a call is the longer of two times: reading its inputs and writing its outputs once at the peak
bandwidth, and its multiplications at the peak rate. Other devices are held against the speed of a plain copy.
Shapes: N observing rows, T prompt keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.bench import timing
from longtrain.costs.hardware import gpu_called
from longtrain.kernels import importance
from longtrain.kernels.importance import Span, reference

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo

COLUMNS = {
    "rows": "rows",
    "keys": "keys",
    "call": "call",
    "kernel ms": "kernel_ms.median",
    "p10": "kernel_ms.p10",
    "p90": "kernel_ms.p90",
    "torch ms": "torch_ms.median",
    "torch / kernel": "speed",
    "bound ms": "bound_ms",
    "of the bound": "share_of_bound",
    "difference": "relative_difference",
    "failed": "failed",
}

PRODUCTS = {"suffix_lse": 1, "importance": 1, "suffix_attention": 2, "suffix_attention backward": 4}
"""Calls, and the products of rows x keys x head dim that each cannot do without."""

MOST_SUFFIX_ROWS = 128
"""Lookahead rows run through `suffix_attention`; more rows than this are a response, which is only scored."""

ROTATED_BYTES = 2**28
"""Copies of K and V are made up to so many bytes and used in turn: no call finds its keys in a cache."""


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        device: cuda or cpu.
        dtype: of queries, keys and values.
        cells: (rows, keys) pairs.
        warmup: calls not counted.
        repeats: calls counted.
        seed: of the inputs.
    """

    device: torch.device
    dtype: torch.dtype
    cells: tuple[tuple[int, int], ...]
    warmup: int = 3
    repeats: int = 30
    seed: int = 0


@dataclass(frozen=True)
class _Inputs:
    q_NHD: Tensor
    own_k_NGD: Tensor
    own_v_NGD: Tensor
    k_BTGD: list[Tensor]
    v_BTGD: list[Tensor]
    grad_out_NHD: Tensor
    grad_s_BHT: Tensor
    spans: list[Span]
    scale: float


def measure(settings: Settings, info: TargetInfo) -> Iterator[dict[str, Any]]:
    """One entry a cell and call, as they are ready; what does not fit in memory says so."""
    for n_rows, n_keys in settings.cells:
        inputs = _inputs(settings, info, n_rows, n_keys)
        for call in PRODUCTS if n_rows <= MOST_SUFFIX_ROWS else ("suffix_lse", "importance"):
            cell = {"rows": n_rows, "keys": n_keys, "call": call, "heads": [info.n_heads, info.n_kv_heads]}
            bound = _bound(call, settings, info, n_rows, n_keys)
            try:
                yield {**cell, **bound, **_measure(call, settings, inputs, bound["bound_ms"])}
            except torch.OutOfMemoryError as error:
                yield {**cell, **bound, "failed": f"out of memory: {str(error).partition('.')[0]}"}
            timing.release(settings.device)


def _measure(call: str, settings: Settings, inputs: _Inputs, bound_ms: float) -> dict[str, Any]:
    how = {"warmup": settings.warmup, "repeats": settings.repeats}
    fast, plain = _work(call, importance, inputs), _work(call, reference, inputs)
    pairs = list(zip(fast(0), plain(0), strict=True))
    gap = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)
    del pairs
    kernel_ms = timing.short(fast, settings.device, **how)
    torch_ms = timing.short(plain, settings.device, warmup=1, repeats=max(3, settings.repeats // 5))
    return {
        "kernel_ms": kernel_ms,
        "torch_ms": torch_ms,
        "speed": torch_ms["median"] / kernel_ms["median"],
        "share_of_bound": bound_ms / kernel_ms["median"],
        "relative_difference": gap,
    }


def _work(call: str, ops: Any, x: _Inputs) -> Callable[[int], tuple[Tensor, ...]]:
    """A call of one implementation on the i-th copy of the keys."""
    copies, how = len(x.k_BTGD), {"scale": x.scale}
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


def _inputs(settings: Settings, info: TargetInfo, n_rows: int, n_keys: int) -> _Inputs:
    device, dtype = settings.device, settings.dtype
    coins = torch.Generator(device=device).manual_seed(settings.seed)
    H, G, D = info.n_heads, info.n_kv_heads, info.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=coins, device=device, dtype=dtype)

    size = 2 * n_keys * G * D * dtype.itemsize
    copies = max(2, -(-ROTATED_BYTES // size)) if device.type == "cuda" else 1
    # as a cache hands them out: heads before slots in memory
    keys, values = ([random(1, G, n_keys, D).transpose(1, 2) for _ in range(copies)] for _ in range(2))
    return _Inputs(
        random(n_rows, H, D),
        random(n_rows, G, D),
        random(n_rows, G, D),
        keys,
        values,
        random(n_rows, H, D),
        random(1, H, n_keys).float(),
        [Span((0, n_rows), 0, (0, n_keys))],
        D**-0.5,
    )


def _bound(call: str, settings: Settings, info: TargetInfo, n_rows: int, n_keys: int) -> dict[str, Any]:
    """Least milliseconds of a call on this device."""
    device = settings.device
    gpu = gpu_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    matrices = 2 if call.startswith("suffix_attention") else 1
    scores = 0 if call == "suffix_lse" else 4 * info.n_heads * n_keys
    moved = matrices * info.n_kv_heads * n_keys * info.head_dim * settings.dtype.itemsize + scores
    flops = 2 * PRODUCTS[call] * info.n_heads * n_rows * n_keys * info.head_dim
    bytes_per_s = gpu.bytes_per_s if gpu else timing.copy_bytes_per_s(device)
    seconds = max(moved / bytes_per_s, flops / gpu.flops_per_s if gpu else 0.0)
    return {
        "bound_ms": 1e3 * seconds,
        "bound_by": f"data sheet of {gpu.name}" if gpu else "a plain copy",
        "bound_bytes": moved,
        "bound_flops": flops,
    }
