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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from longtrain.bench import graphs, timing
from longtrain.kernels import int4_linear
from longtrain.kernels.fused_layer import swiglu
from longtrain.kernels.small_linear import small_linear, small_swiglu
from longtrain.log import get_logger

log = get_logger(__name__)

COLUMNS = {
    "weights": "weights",
    "layer": "layer",
    "F x K": "shape",
    "rows": "rows",
    "ms": "ms.median",
    "p10": "ms.p10",
    "p90": "ms.p90",
    "TB/s": "tb_per_s",
    "of read": "of_read",
    "torch ms": "stock.median",
    "speed": "speed",
    "difference": "relative_difference",
}
WEIGHTS = ("dense", "int4")
"""Weights in the rows' dtype, or in 4 bits."""
GROUP = 128
"""Input features of 4-bit weights that share a scale."""
GATES = "gate_up"
"""The layer that ends in SwiGLU."""

Work = Callable[[int], Tensor]
"""The product with another copy of the weights each time."""


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        device: cuda or cpu.
        dtype: of rows and 16-bit weights.
        layers: name -> output and input features.
        per_step: name -> how often a step uses the layer.
        weights: of `WEIGHTS`.
        rows: counts of rows.
        repeats: replays counted.
        seed: of the inputs.
    """

    device: torch.device
    dtype: torch.dtype
    layers: dict[str, tuple[int, int]]
    per_step: dict[str, int]
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    repeats: int = 50
    seed: int = 0


def layers_of(config: Any) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Layers of a model of the Llama kind and how often a step uses them, from its transformers config."""
    E, depth = config.hidden_size, config.num_hidden_layers
    D = getattr(config, "head_dim", None) or E // config.num_attention_heads
    H, G, intermediate = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    layers = {
        "qkv": ((H + 2 * G) * D, E),
        "out": (E, H * D),
        GATES: (2 * intermediate, E),
        "down": (E, intermediate),
        "head": (config.vocab_size, E),
    }
    return layers, {name: 1 if name == "head" else depth for name in layers}


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """One entry a layer, kind of weights and count of rows; then a step of all layers."""
    for weights in settings.weights:
        entries: list[dict[str, Any]] = []
        for name, (F, K) in settings.layers.items():
            torch.manual_seed(settings.seed)
            for row in _layer(settings, weights, name, F, K):
                ms = row["ms"]["median"]
                log.info("layer=%s weights=%s rows=%d ms=%.4g", name, weights, row["rows"], ms)
                entries.append(row)
                yield row
            timing.release(settings.device)
        for N in settings.rows:
            yield _step(settings, weights, N, [row for row in entries if row["rows"] == N])


def _layer(settings: Settings, weights: str, name: str, F: int, K: int) -> Iterator[dict[str, Any]]:
    """Entries of one layer."""
    make = _dense if weights == "dense" else _int4
    size = F * K * (settings.dtype.itemsize if weights == "dense" else 0.5 + 4 / GROUP)
    copies = graphs.copies_of(int(size), settings.device)
    work_of = make(settings, F, K, copies, gated=name == GATES)
    for N in settings.rows:
        x_NK = _normal(settings, N, K)
        mine, stock, want = work_of(x_NK)
        how = {"calls": max(4, copies), "repeats": settings.repeats}
        row: dict[str, Any] = {"weights": weights, "layer": name, "shape": f"{F} x {K}", "rows": N}
        row["ms"] = graphs.replayed(mine, settings.device, **how)
        row["tb_per_s"] = size / row["ms"]["median"] / 1e9
        row["read_tb_per_s"] = graphs.read_bytes_per_s(settings.device) / 1e12
        row["of_read"] = row["tb_per_s"] / row["read_tb_per_s"]
        row["relative_difference"] = float((mine(0).float() - want).norm() / want.norm())
        if stock is not None:
            row["stock"] = graphs.replayed(stock, settings.device, **how)
            row["speed"] = row["stock"]["median"] / row["ms"]["median"]
        yield row


def _step(settings: Settings, weights: str, N: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All linear layers of a decoding step, as the sum of their times."""

    def total(key: str) -> dict[str, float]:
        return {
            part: sum(settings.per_step[row["layer"]] * row[key][part] for row in rows)
            for part in ("median", "p10", "p90")
        }

    found: dict[str, Any] = {"weights": weights, "layer": "a step", "rows": N, "ms": total("ms")}
    size = sum(settings.per_step[row["layer"]] * row["tb_per_s"] * row["ms"]["median"] for row in rows)
    found["tb_per_s"] = size / found["ms"]["median"]
    found["of_read"] = found["tb_per_s"] / rows[0]["read_tb_per_s"]
    if all("stock" in row for row in rows):
        found["stock"] = total("stock")
        found["speed"] = found["stock"]["median"] / found["ms"]["median"]
    return found


def _dense(settings: Settings, F: int, K: int, copies: int, *, gated: bool) -> Any:
    """Rows -> the kernel's work, torch's, and the product in fp32."""
    held = [_normal(settings, F, K) * K**-0.5 for _ in range(copies)]

    def work_of(x_NK: Tensor) -> tuple[Work, Work, Tensor]:
        wide = linear(x_NK.float(), held[0].float())
        if gated:
            return (
                lambda i: small_swiglu(x_NK, held[i % copies]),
                lambda i: swiglu(linear(x_NK, held[i % copies])),
                _gated(wide),
            )
        return lambda i: small_linear(x_NK, held[i % copies]), lambda i: linear(x_NK, held[i % copies]), wide

    return work_of


def _int4(settings: Settings, F: int, K: int, copies: int, *, gated: bool) -> Any:
    """The same on 4-bit weights; torch's operation is there on CUDA alone."""
    source = nn.Linear(K, F, bias=False, device=settings.device, dtype=settings.dtype).requires_grad_(False)
    first = int4_linear.Int4Linear(source, GROUP)
    held = [first, *(deepcopy(first) for _ in range(copies - 1))]
    stock_of = _tinygemm(F, K, copies, gated=gated) if settings.device.type == "cuda" else None

    def work_of(x_NK: Tensor) -> tuple[Work, Work | None, Tensor]:
        wide = linear(x_NK.float(), int4_linear.written_out(first.codes, first.table, torch.float32)[:F])
        stock = None if stock_of is None else stock_of(x_NK)
        if gated:
            return lambda i: held[i % copies].swiglu(x_NK), stock, _gated(wide)
        return lambda i: held[i % copies](x_NK), stock, wide

    return work_of


def _tinygemm(F: int, K: int, copies: int, *, gated: bool) -> Callable[[Tensor], Work]:
    """Torch's own operation on random codes in its own order of bytes."""
    group = int4_linear.group_of(K, GROUP)
    rows = -(-F // 8) * 8
    codes = torch.randint(0, 256, (rows, K // 2), dtype=torch.uint8, device="cuda")
    table_JF2 = torch.randn(K // group, rows, 2, dtype=torch.bfloat16, device="cuda")
    packed = [torch.ops.aten._convert_weight_to_int4pack(codes, group // 16) for _ in range(copies)]

    def work_of(x_NK: Tensor) -> Work:
        def work(i: int) -> Tensor:
            out = torch.ops.aten._weight_int4pack_mm(x_NK.bfloat16(), packed[i % copies], group, table_JF2)
            return swiglu(out) if gated else out

        return work

    return work_of


def _normal(settings: Settings, *shape: int) -> Tensor:
    return torch.randn(shape, device=settings.device, dtype=settings.dtype)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
