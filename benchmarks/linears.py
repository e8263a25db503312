"""Milliseconds of a decoding step's linear layers on a few tokens, compared with PyTorch's products.

The baselines are torch's product (and SwiGLU where the kernel does both) for 16-bit weights and torch's
tinygemm operation for 4-bit ones. Weights rotate through more than the L2 cache in a CUDA graph; `of_read` is
their bytes a second over the most that a plain reduction reads on this device.
Shapes: N tokens, K input features, F output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from benchmarks import replay
from benchmarks.operators import RandomInputs, Shape, bandwidth, distance, replayed
from longtrain.bench import clock
from longtrain.bench.suites import Bench, Context, Row, shape_keys
from longtrain.costs.model import Sizes
from longtrain.kernels import int4_linear
from longtrain.kernels.fused_layer import swiglu
from longtrain.kernels.small_linear import small_linear, small_swiglu
from longtrain.settings import NOT_EMPTY, Count, Counts

COLUMNS = {
    "weights": "weights",
    "layer": "layer",
    "F x K": "shape",
    "rows": "rows",
    **clock.spread_columns("ms", "ms"),
    "TB/s": "tb_per_s",
    "of read": "of_read",
    "torch ms": "stock.median",
    "speed": "speed",
    "difference": "relative_difference",
    "failed": "failed",
}
GROUP = 128
"""Input features of 4-bit weights that share a scale."""
GATES = "gate_up"
"""Name of the layer that ends in SwiGLU."""
Product = Callable[[Tensor, int], Tensor]
"""(inputs, index of the copy of the weights) -> a product."""


@dataclass(frozen=True)
class LinearsSettings:
    """The keys of `suite=linears`.

    Args:
        shape: the model whose layers are measured.
        weights: kinds of weights: in the inputs' dtype, and in 4 bits.
        rows: numbers of tokens.
        repeats: counted replays.
    """

    shape: Shape
    weights: Annotated[tuple[Literal["dense", "int4"], ...], NOT_EMPTY] = ("dense", "int4")
    rows: Counts = (1, 5, 8)
    repeats: Count = 50


def layers_of(size: Sizes) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Return output and input features of a model's fused linears, and how often a step uses each."""
    E, heads = size.hidden_size, size.n_heads * size.head_dim
    layers = {
        "qkv": (heads + 2 * size.n_kv_heads * size.head_dim, E),
        "out": (E, heads),
        GATES: (2 * size.intermediate_size, E),
        "down": (E, size.intermediate_size),
        "head": (size.vocab_size, E),
    }
    return layers, {name: 1 if name == "head" else size.n_layers for name in layers}


def run(settings: LinearsSettings, context: Context) -> Iterator[Row]:
    """Yield a row for each layer, kind of weights and number of tokens; then for a step of all layers."""
    inputs = RandomInputs.usual(context)
    layers, per_step = layers_of(Sizes.of_keys(shape_keys(settings.shape)))
    for kind in settings.weights:
        found: list[Row] = []
        for name, (F, K) in layers.items():
            inputs.restart()
            weights = WEIGHTS[kind](inputs, F, K, gated=name == GATES)
            for N in settings.rows:
                about = {"weights": kind, "layer": name, "shape": f"{F} x {K}", "rows": N}
                parts = _metrics(weights, inputs, inputs.normal(N, K), settings.repeats)
                found.append(clock.filled(about, parts, context.device))
                yield found[-1]
            del weights
            clock.release(context.device)
        for N in settings.rows:
            rows = [row for row in found if row["rows"] == N]
            if not any("failed" in row for row in rows):
                yield _step(kind, N, rows, per_step)


@dataclass(frozen=True)
class LayerWeights:
    """Copies of a layer's weights, used in turn.

    Args:
        bytes: bytes of one copy.
        copies: number of copies.
        gated: True if the layer ends in SwiGLU.
        kernel: computes the layer's output with longtrain's kernel.
        stock: computes PyTorch's product, without SwiGLU; None: PyTorch has none.
        exact_FK: the dequantised weights.
    """

    bytes: float
    copies: int
    gated: bool
    kernel: Product
    stock: Product | None
    exact_FK: Tensor


def _metrics(weights: LayerWeights, inputs: RandomInputs, x_NK: Tensor, repeats: int) -> Iterator[Row]:
    """Time the kernel and PyTorch's product, and measure the kernel's distance from fp32."""
    device, copies, gated = inputs.device, weights.copies, weights.gated
    ms = replayed(lambda i: weights.kernel(x_NK, i), device, copies=copies, repeats=repeats)
    exact = linear(x_NK.float(), weights.exact_FK.float())
    if gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = silu(gate) * up
    gap = distance(weights.kernel(x_NK, 0), exact)
    yield {"ms": ms, **bandwidth(weights.bytes, ms["median"], device), "relative_difference": gap}
    if (product := weights.stock) is not None:
        whole = (lambda i: swiglu(product(x_NK, i))) if gated else (lambda i: product(x_NK, i))
        stock = replayed(whole, device, copies=copies, repeats=repeats)
        yield {"stock": stock, "speed": stock["median"] / ms["median"]}


def _step(weights: str, N: int, rows: list[Row], per_step: dict[str, int]) -> Row:
    """Return the row of a decoding step, as the sum of its linear layers' times."""

    def total(key: str) -> dict[str, float]:
        return {
            part: sum(per_step[row["layer"]] * row[key][part] for row in rows)
            for part in ("median", "p10", "p90")
        }

    found: Row = {"weights": weights, "layer": "a step", "rows": N, "ms": total("ms")}
    size = sum(per_step[row["layer"]] * row["tb_per_s"] * row["ms"]["median"] for row in rows)
    found["tb_per_s"] = size / found["ms"]["median"]
    found["of_read"] = found["tb_per_s"] / rows[0]["read_tb_per_s"]
    if all("stock" in row for row in rows):
        found["stock"] = total("stock")
        found["speed"] = found["stock"]["median"] / found["ms"]["median"]
    return found


def _dense(inputs: RandomInputs, F: int, K: int, *, gated: bool) -> LayerWeights:
    """Build weights in the inputs' dtype."""
    size = F * K * inputs.dtype.itemsize
    copies = replay.copies_of(size, inputs.device)
    held = [inputs.normal(F, K) * K**-0.5 for _ in range(copies)]
    kernel = small_swiglu if gated else small_linear
    return LayerWeights(
        size, copies, gated, lambda x, i: kernel(x, held[i]), lambda x, i: linear(x, held[i]), held[0]
    )


def _int4(inputs: RandomInputs, F: int, K: int, *, gated: bool) -> LayerWeights:
    """Build 4-bit weights; PyTorch's operator exists only on CUDA."""
    source = nn.Linear(K, F, bias=False, device=inputs.device, dtype=inputs.dtype).requires_grad_(False)
    first = int4_linear.Int4Linear(source, GROUP)
    copies = replay.copies_of(first.bytes(), inputs.device)
    held = [first, *(deepcopy(first) for _ in range(copies - 1))]
    exact_FK = first.written_out(torch.float32)
    stock = _tinygemm(F, K, copies) if inputs.device.type == "cuda" else None
    return LayerWeights(
        first.bytes(), copies, gated, lambda x, i: (held[i].swiglu if gated else held[i])(x), stock, exact_FK
    )


def _tinygemm(F: int, K: int, copies: int) -> Product:
    """Return PyTorch's tinygemm operator with random codes in its own layout."""
    group = int4_linear.group_of(K, GROUP)
    rows = -(-F // 8) * 8
    codes = torch.randint(0, 256, (rows, K // 2), dtype=torch.uint8, device="cuda")
    table_JF2 = torch.randn(K // group, rows, 2, dtype=torch.bfloat16, device="cuda")
    packed = [torch.ops.aten._convert_weight_to_int4pack(codes, group // 16) for _ in range(copies)]
    return lambda x, i: torch.ops.aten._weight_int4pack_mm(x.bfloat16(), packed[i], group, table_JF2)


WEIGHTS = {"dense": _dense, "int4": _int4}
BENCH = Bench(settings=LinearsSettings, run=run, columns=COLUMNS)
