"""Milliseconds of a decoding step's linear layers on a few rows, beside torch's own products.

The baselines are torch's product (and SwiGLU where the kernel does both) for 16-bit weights and torch's
tinygemm operation for 4-bit ones. Weights rotate through more than the L2 cache in a CUDA graph; `of_read` is
their bytes a second over the most that a plain reduction reads on this device.
Shapes: N rows, K input features, F output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from longtrain.bench import clock
from longtrain.bench.operators import Call, RandomInputs, bandwidth, distance
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
}
GROUP = 128
"""Input features of 4-bit weights that share a scale."""
GATES = "gate_up"
"""The layer that ends in SwiGLU."""
CPU_SHAPE = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
"""Small enough for a CPU, features in groups of 64 and more."""


@dataclass(frozen=True)
class LinearsSettings:
    """The keys of `suite=linears`.

    Args:
        shape: the model whose layers are measured: a published name, or the keys of a `config.json`.
        weights: weights in the rows' dtype, and in 4 bits.
        rows: counts of rows.
        repeats: replays counted.
    """

    shape: str | dict[str, Any]
    weights: Annotated[tuple[Literal["dense", "int4"], ...], NOT_EMPTY] = ("dense", "int4")
    rows: Counts = (1, 5, 8)
    repeats: Count = 50


def layers_of(size: Sizes) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Output and input features of a model's layers as kernels take them, and how often a step uses each."""
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
    """One row a layer, kind of weights and count of rows; then a step of all layers."""
    inputs = RandomInputs.usual(context)
    layers, per_step = layers_of(Sizes.of_keys(shape_keys(settings.shape)))
    for weights in settings.weights:
        found: list[Row] = []
        for name, (F, K) in layers.items():
            inputs.restart()
            for row in _layer(settings, inputs, weights, name, F, K):
                found.append(row)
                yield row
            clock.release(context.device)
        for N in settings.rows:
            yield _step(weights, N, [row for row in found if row["rows"] == N], per_step)


def _layer(
    settings: LinearsSettings, inputs: RandomInputs, weights: str, name: str, F: int, K: int
) -> Iterator[Row]:
    """Rows of one layer."""
    device = inputs.device
    make = _dense if weights == "dense" else _int4
    size = F * K * (inputs.dtype.itemsize if weights == "dense" else 0.5 + 4 / GROUP)
    copies = clock.copies_of(int(size), device)
    products_of = make(inputs, F, K, copies, gated=name == GATES)
    for N in settings.rows:
        mine, stock, want = products_of(inputs.normal(N, K))
        how = {"calls": max(4, copies), "repeats": settings.repeats}
        row: Row = {"weights": weights, "layer": name, "shape": f"{F} x {K}", "rows": N}
        row["ms"] = clock.replayed(mine, device, **how)
        row |= bandwidth(size, row["ms"]["median"], device)
        row["relative_difference"] = distance(mine(0), want)
        if stock is not None:
            row["stock"] = clock.replayed(stock, device, **how)
            row["speed"] = row["stock"]["median"] / row["ms"]["median"]
        yield row


def _step(weights: str, N: int, rows: list[Row], per_step: dict[str, int]) -> Row:
    """All linear layers of a decoding step, as the sum of their times."""

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


Products = Callable[[Tensor], tuple[Call, Call | None, Tensor]]
"""Rows -> the kernel's product, torch's where there is one, and the product in fp32."""


def _dense(inputs: RandomInputs, F: int, K: int, copies: int, *, gated: bool) -> Products:
    """Products with 16-bit weights."""
    held = [inputs.normal(F, K) * K**-0.5 for _ in range(copies)]

    def products_of(x_NK: Tensor) -> tuple[Call, Call, Tensor]:
        wide = linear(x_NK.float(), held[0].float())
        if gated:
            return (
                lambda i: small_swiglu(x_NK, held[i % copies]),
                lambda i: swiglu(linear(x_NK, held[i % copies])),
                _gated(wide),
            )
        return lambda i: small_linear(x_NK, held[i % copies]), lambda i: linear(x_NK, held[i % copies]), wide

    return products_of


def _int4(inputs: RandomInputs, F: int, K: int, copies: int, *, gated: bool) -> Products:
    """Products with 4-bit weights; torch's operation is there on CUDA alone."""
    source = nn.Linear(K, F, bias=False, device=inputs.device, dtype=inputs.dtype).requires_grad_(False)
    first = int4_linear.Int4Linear(source, GROUP)
    held = [first, *(deepcopy(first) for _ in range(copies - 1))]
    stock_of = _tinygemm(F, K, copies, gated=gated) if inputs.device.type == "cuda" else None

    def products_of(x_NK: Tensor) -> tuple[Call, Call | None, Tensor]:
        wide = linear(x_NK.float(), int4_linear.written_out(first.codes, first.table, torch.float32)[:F])
        stock = None if stock_of is None else stock_of(x_NK)
        if gated:
            return lambda i: held[i % copies].swiglu(x_NK), stock, _gated(wide)
        return lambda i: held[i % copies](x_NK), stock, wide

    return products_of


def _tinygemm(F: int, K: int, copies: int, *, gated: bool) -> Callable[[Tensor], Call]:
    """Torch's own operation on random codes in its own order of bytes."""
    group = int4_linear.group_of(K, GROUP)
    rows = -(-F // 8) * 8
    codes = torch.randint(0, 256, (rows, K // 2), dtype=torch.uint8, device="cuda")
    table_JF2 = torch.randn(K // group, rows, 2, dtype=torch.bfloat16, device="cuda")
    packed = [torch.ops.aten._convert_weight_to_int4pack(codes, group // 16) for _ in range(copies)]

    def product_of(x_NK: Tensor) -> Call:
        def product(i: int) -> Tensor:
            out = torch.ops.aten._weight_int4pack_mm(x_NK.bfloat16(), packed[i % copies], group, table_JF2)
            return swiglu(out) if gated else out

        return product

    return product_of


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


BENCH = Bench(settings=LinearsSettings, run=run, columns=COLUMNS, auto={"shape": ("llama31_8b", CPU_SHAPE)})
