"""Milliseconds per layer of the decoding attention kernels, compared with PyTorch's fastest attention.

Kernels are replayed in a CUDA graph on rotating inputs, so that neither host time nor a warm cache affects
the result. `of_read` is a kernel's bytes per second divided by those of a plain reduction on the device.
Shapes: T new tokens, S cached keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from benchmarks import attention_baselines as stock
from benchmarks import drawing, replay
from benchmarks.operators import RandomInputs, bandwidth, bound, distance, replayed
from longtrain import plots
from longtrain.bench import clock
from longtrain.bench.suites import Auto, Bench, Context, Dtype, Row
from longtrain.kernels.hierarchical import hier_attention, layout
from longtrain.kernels.hierarchical.reference import hier_attention as plain_hier_attention
from longtrain.kernels.tree_attention import CAUSAL, Causal, tree_attention, tree_bits
from longtrain.kernels.tree_attention.reference import tree_attention as plain_tree_attention
from longtrain.settings import Count, Tokens, Words, fulfils, within, wrong
from longtrain.tables import tokens

COLUMNS = {
    "cache": "cache",
    "heads": "heads",
    "rows": "rows",
    "keys": "keys",
    "kernel": "kernel",
    **clock.spread_columns("ms", "ms"),
    "TB/s": "tb_per_s",
    "of read": "of_read",
    "bound ms": "bound_ms",
    "of the bound": "share_of_bound",
    "best stock": "best.name",
    "its ms": "best.ms",
    "speed": "best.speed",
    "without mask": "unmasked.name",
    "speed over it": "unmasked.speed",
    "difference": "relative_difference",
    "failed": "failed",
}

BITS = {"dense": None, "int8": 8, "int4": 4}
"""Caches: the model's dtype, or the hierarchical cache read at 8 or 4 bits."""
RECENT = 192
"""Tokens in the ring buffer of a hierarchical cache: its average."""

CUDA_CELLS = (
    ("dense", 1, "32k"), ("int4", 1, "32k"), ("dense", 1, "128k"), ("int4", 1, "128k"), ("int4", 1, "256k"),
    ("int8", 7, "32k"), ("int8", 7, "128k"), ("dense", 7, "128k"), ("dense", 8, "32k"), ("dense", 8, "128k"),
    ("dense", 64, "32k"), ("dense", 64, "128k"),
)  # fmt: skip
CPU_CELLS = (("dense", 1, 512), ("int4", 1, 512), ("int8", 7, 512), ("dense", 8, 512))


Heads = Annotated[
    tuple[Count, Count],
    fulfils(lambda heads: heads[0] % heads[1] == 0),
    Words("[query heads, KV heads], query heads a multiple of KV heads"),
]
CacheRowsKeys = Annotated[
    tuple[Literal["dense", "int8", "int4"], Annotated[int, within(1, 128)], Tokens],
    fulfils(lambda cell: cell[0] == "dense" or cell[2] >= 2 * RECENT),
    Words(
        "[cache, new rows, keys], as [int4, 1, 32k]: dense, int8 or int4, 1 to 128 rows, and over a "
        f"quantised cache {2 * RECENT} keys or more"
    ),
]


@dataclass(frozen=True)
class KernelsSettings:
    """The keys of `suite=kernels`.

    Args:
        dtype: dtype of queries, of dense caches and of the ring buffer.
        heads: query heads and KV heads.
        head_dim: size of a head.
        cells: cache, new tokens and cached keys of each call; calls of one shape share their baselines.
        mha_heads: heads of a second round with as many query heads as KV heads; None: no such round.
        mha_cells: the calls of that round.
        baselines: PyTorch attention to compare with.
        candidates: also time the tile sizes that the kernels would not choose.
        repeats: counted replays.
    """

    dtype: Dtype
    heads: Annotated[Heads, Auto((32, 8), (4, 2))]
    head_dim: Annotated[Literal[64, 128], Auto(128, 64)]
    cells: Annotated[tuple[CacheRowsKeys, ...], Auto(CUDA_CELLS, CPU_CELLS)]
    mha_heads: Annotated[Count | None, Auto(32, None)]
    mha_cells: tuple[CacheRowsKeys, ...]
    baselines: Annotated[tuple[stock.BaselineName, ...], Auto(stock.NAMES, stock.ON_CPU)]
    candidates: bool = False
    repeats: Count = 50

    def __post_init__(self) -> None:
        if not self.calls:
            raise wrong("suite.cells", [], "one or more calls, such as [[dense, 1, 32k]]")

    @property
    def calls(self) -> list[AttentionCall]:
        """Return the measured calls."""
        rounds = [(self.heads, self.cells)]
        if self.mha_heads is not None:
            rounds.append(((self.mha_heads, self.mha_heads), self.mha_cells))
        return [
            AttentionCall(cache, *heads, rows, keys, self.head_dim)
            for heads, cells in rounds
            for cache, rows, keys in cells
        ]


@dataclass(frozen=True)
class AttentionCall:
    """One attention call.

    Args:
        cache: a key of `BITS`.
        heads: query heads.
        kv_heads: KV heads.
        rows: new tokens; up to 7 they are a chain, from 8 on a random tree.
        keys: cached keys.
        head_dim: size of a head.
    """

    cache: str
    heads: int
    kv_heads: int
    rows: int
    keys: int
    head_dim: int = 128

    @property
    def bytes(self) -> int:
        """Least bytes that the call reads: keys and values, or their codes with scales and zero points."""
        if self.cache == "dense":
            return 4 * self.kv_heads * self.keys * self.head_dim
        planes = 1 if self.cache == "int4" else 2
        block = layout.BLOCK * self.head_dim * planes + 4 * (self.head_dim + layout.BLOCK)
        recent = 4 * min(RECENT, self.keys) * self.head_dim
        return self.kv_heads * ((self.keys - RECENT) // layout.BLOCK * block + recent)

    @property
    def flops(self) -> int:
        """Floating-point operations of both products."""
        return 4 * self.heads * self.rows * (self.keys + self.rows) * self.head_dim

    @property
    def shape(self) -> tuple[int, ...]:
        """Key of calls that share the same baselines."""
        return (self.heads, self.kv_heads, self.rows, self.keys, self.head_dim)


def run(settings: KernelsSettings, context: Context) -> Iterator[Row]:
    """Yield a row for each call; one that does not fit in memory has `failed`."""
    inputs = RandomInputs(context.device, getattr(torch, settings.dtype), context.seed)
    by_shape: dict[tuple[int, ...], Row] = {}
    for call in settings.calls:
        inputs.restart()
        about = {
            "cache": call.cache,
            "heads": f"{call.heads}/{call.kv_heads}",
            "rows": call.rows,
            "keys": call.keys,
            "kernel": "triton" if context.cuda else "torch twin",
            **bound(call.bytes, call.flops, context),
            "bytes": call.bytes,
            "flops": call.flops,
        }
        yield clock.filled(about, _metrics(call, settings, inputs, about, by_shape), context.device)


def _metrics(
    call: AttentionCall, settings: KernelsSettings, inputs: RandomInputs, about: Row, by_shape: dict[Any, Row]
) -> Iterator[Row]:
    """Time the kernel and PyTorch's attention; `by_shape` caches the latter for calls of the same shape."""
    found = _kernel(call, settings, inputs)
    ms = found["ms"]["median"]
    yield {**found, **bandwidth(call.bytes, ms, inputs.device), "share_of_bound": about["bound_ms"] / ms}
    if call.shape not in by_shape:
        clock.release(inputs.device)
        by_shape[call.shape] = _baselines(call, settings, inputs)
    yield _against(by_shape[call.shape], ms)


def _kernel(call: AttentionCall, settings: KernelsSettings, inputs: RandomInputs) -> Row:
    """Time the kernel (and other tile sizes), and compare it with its PyTorch reference implementation."""
    device, bits = inputs.device, BITS[call.cache]
    copies = replay.copies_of(call.bytes, device)
    q_BHTD = inputs.normal(1, call.heads, call.rows, call.head_dim)
    mask, _ = _mask(call, device)
    options: dict[str, Any] = {"scale": call.head_dim**-0.5}
    kernel: Any = tree_attention
    reference: Any = plain_tree_attention
    layers_of = _dense_layers
    if bits is not None:
        kernel, reference, layers_of = hier_attention, plain_hier_attention, _quantised_layers
        options["bits"] = bits
    layers, lens = layers_of(call, inputs, copies)

    def called(operator: Any, i: int, **more: Any) -> Tensor:
        out: Tensor = operator(q_BHTD, *layers[i], lens, mask, **options, **more)[0]
        return out

    def timed(operator: Any, **more: Any) -> Row:
        how = {"copies": copies, "repeats": settings.repeats}
        return {"ms": replayed(lambda i: called(operator, i, **more), device, **how)}

    gap = distance(called(kernel, 0), called(reference, 0))
    found = {**timed(kernel), "copies": copies, "relative_difference": gap}
    if settings.candidates and device.type == "cuda":
        launch, tiles = _tiles(call, inputs)
        found["tiles"] = [
            {"tile": str(tile), **_or_failed(partial(timed, launch, tile=tile), device)} for tile in tiles
        ]
    return found


def _tiles(call: AttentionCall, inputs: RandomInputs) -> tuple[Any, Sequence[Any]]:
    """Return the launch function that takes a tile size, and the available tile sizes."""
    bits, group = BITS[call.cache], call.heads // call.kv_heads
    if bits is None:
        from longtrain.kernels.tree_attention import launch

        return partial(launch.tree_attention, base=0, splits=None), launch.candidates(call.rows * group)
    from longtrain.kernels.hierarchical import attention_launch

    tiles = attention_launch.candidates(call.rows * group, bits, group, call.head_dim, inputs.dtype)
    return attention_launch.hier_attention, tiles


def _dense_layers(call: AttentionCall, inputs: RandomInputs, copies: int) -> tuple[list[Any], Any]:
    """Return random keys and values, one pair for each copy, and their valid length."""
    shape = (1, call.kv_heads, call.keys + call.rows, call.head_dim)
    caches = [(inputs.normal(*shape), inputs.normal(*shape)) for _ in range(copies)]
    return caches, torch.tensor([call.keys], device=inputs.device)


def _quantised_layers(call: AttentionCall, inputs: RandomInputs, copies: int) -> tuple[list[Any], Any]:
    """Return random quantised planes and ring buffers, one pair for each copy, and their valid length."""
    device, blocks = inputs.device, (call.keys - RECENT) // layout.BLOCK
    sizes: Any = {"n_layers": copies, "batch": 1, "n_kv_heads": call.kv_heads, "head_dim": call.head_dim}
    planes = layout.new_planes(**sizes, blocks=blocks, split=layout.Split.FLOOR, device=device)
    for codes in (planes.k_upper, planes.k_lower, planes.v_upper, planes.v_lower):
        codes.random_(0, 256)
    for numbers, low, high in (
        (planes.k_step, 0.1, 0.5),
        (planes.k_zero, -5.0, -1.0),
        (planes.v_step, 0.1, 0.3),
        (planes.v_zero, -2.0, -1.0),
    ):
        numbers.uniform_(low, high)
    ring = layout.new_ring(**sizes, device=device, dtype=inputs.dtype)
    ring.k.normal_()
    ring.v.normal_()
    lens = layout.Lens(torch.tensor([call.keys], device=device), torch.tensor([blocks], device=device))
    return [(planes.layer(i), ring.layer(i)) for i in range(copies)], lens


def _baselines(call: AttentionCall, settings: KernelsSettings, inputs: RandomInputs) -> Row:
    """Time PyTorch's attention over a dense cache of the call's shape, by name."""
    device = inputs.device
    copies = replay.copies_of(replace(call, cache="dense").bytes, device)
    caches, _ = _dense_layers(call, inputs, copies)
    k_BGSD, v_BGSD = caches[0]
    q_BHTD = inputs.normal(1, call.heads, call.rows, call.head_dim)
    x = stock.StockInputs(q_BHTD, k_BGSD, v_BGSD, call.keys, _mask(call, device)[1])

    def timed(name: str) -> Row:
        work, exact = stock.attention_of(name, x)
        how = {"copies": copies, "repeats": max(5, settings.repeats // 2)}
        return {"ms": replayed(lambda i: work(*caches[i]), device, **how), "exact": exact}

    return {name: _or_failed(partial(timed, name), device) for name in settings.baselines}


def _or_failed(work: Callable[[], Row], device: torch.device) -> Row:
    """Return the measurement, or the error: a tile may need more shared memory than the device has, and a
    backend may not support a shape.
    """
    row: Row = {}
    with clock.may_fail(row, device, Exception):
        row |= work()
    return row


def _against(baselines: Row, ms: float) -> Row:
    """Compare with the fastest exact baseline, and with the fastest without the mask."""
    row: Row = {"baselines": baselines}
    for title, exact in (("best", True), ("unmasked", False)):
        times = {name: x["ms"]["median"] for name, x in baselines.items() if x.get("exact") is exact}
        if times:
            name = min(times, key=lambda one: times[one])
            row[title] = {"name": name, "ms": times[name], "speed": times[name] / ms}
    return row


def _mask(call: AttentionCall, device: torch.device) -> tuple[Tensor | Causal, Tensor]:
    """Return the mask in the kernel's form and as visible_BTT."""
    T = call.rows
    visible_TT = torch.ones(T, T, dtype=torch.bool).tril()
    if T < 8:
        return CAUSAL, visible_TT[None].to(device)
    visible_TT = torch.eye(T, dtype=torch.bool)
    for row in range(1, T):
        visible_TT[row] |= visible_TT[int(torch.randint(row, ()))]
    return tree_bits(visible_TT[None]).to(device), visible_TT[None].to(device)


def pictures(rows: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """Draw `kernels.png`: a group of bars for each call, on a log axis; empty without measurements."""
    rows = [row for row in rows if "ms" in row]
    if not rows:
        return {}
    figure, (axes,) = plots.panels(1, size=(2 + 0.9 * len(rows), 4.2))
    places = range(len(rows))
    found = [drawing.of_spread(row["ms"]) for row in rows]
    middle = [one["value"] for one in found]
    axes.bar([x - 0.2 for x in places], middle, 0.4, yerr=plots.arms(found), capsize=2, label="kernel")
    best = [row.get("best", {}).get("ms", float("nan")) for row in rows]
    bars = axes.bar([x + 0.2 for x in places], best, 0.4, color="lightgray", label="fastest stock attention")
    labels = [f"{row['best']['speed']:.2f} ×" if "best" in row else "" for row in rows]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.hlines(
        [row["bound_ms"] for row in rows],
        [x - 0.42 for x in places],
        [x + 0.42 for x in places],
        color="black",
        linewidth=1,
        label="bound: bytes or multiplications at the peak rate",
    )
    axes.set_yscale("log")
    axes.set_ylim(top=1.8 * max([*middle, *(y for y in best if y == y)]))
    names = [
        f"{row['cache']}\n{row['heads']} heads\n{row['rows']} new\n{tokens(row['keys'])}" for row in rows
    ]
    axes.set_xticks(list(places), names, fontsize=8)
    plots.label(axes, y="ms a layer")
    return {"kernels.png": plots.png(figure)}


BENCH = Bench(settings=KernelsSettings, run=run, columns=COLUMNS, pictures=pictures)
