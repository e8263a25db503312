"""Milliseconds a layer of the decoding attention kernels, beside the fastest stock attention of their shape.

Kernels are replayed in a CUDA graph on rotating inputs, so that neither the host nor a warm cache is in the
figures. The bound of a call is the longer of two times: its bytes at the data sheet's bandwidth, and its
multiplications at the data sheet's rate. `of_read` is its bytes a second over the most that a plain reduction
reads on this device.
Shapes: T new rows, S cached keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longtrain.bench import attention_baselines as stock
from longtrain.bench import graphs, timing
from longtrain.costs.hardware import gpu_called
from longtrain.kernels.hierarchical import layout
from longtrain.kernels.hierarchical.attention import hier_attention
from longtrain.kernels.hierarchical.reference import hier_attention as plain_hier_attention
from longtrain.kernels.tree_attention import CAUSAL, Causal, tree_attention, tree_bits
from longtrain.kernels.tree_attention.reference import tree_attention as plain_tree_attention
from longtrain.log import get_logger

log = get_logger(__name__)

COLUMNS = {
    "cache": "cache",
    "heads": "heads",
    "rows": "rows",
    "keys": "keys",
    "kernel": "kernel",
    "ms": "ms.median",
    "p10": "ms.p10",
    "p90": "ms.p90",
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
"""Caches: rows in the model's dtype, or the hierarchical cache read at 8 or 4 bits."""
RECENT = 192
"""Rows of a hierarchical cache that lie in its ring: what it holds on average."""


@dataclass(frozen=True)
class Cell:
    """One attention call.

    Args:
        cache: a key of `BITS`.
        heads: query heads.
        kv_heads: KV heads.
        rows: new rows; a chain up to 7, a random tree from 8 on.
        keys: cached rows.
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
        """Least bytes that the call reads: keys, values and what belongs to their codes."""
        if self.cache == "dense":
            return 4 * self.kv_heads * self.keys * self.head_dim
        planes = 1 if self.cache == "int4" else 2
        block = layout.BLOCK * self.head_dim * planes + 4 * (self.head_dim + layout.BLOCK)
        recent = 4 * min(RECENT, self.keys) * self.head_dim
        return self.kv_heads * ((self.keys - RECENT) // layout.BLOCK * block + recent)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products."""
        return 4 * self.heads * self.rows * (self.keys + self.rows) * self.head_dim


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        device: cuda or cpu.
        dtype: of queries, dense rows and the ring.
        cells: in this order; cells of one shape share their baselines.
        baselines: names of `attention_baselines.NAMES`.
        repeats: replays counted.
        candidates: also time the tiles that the kernels do not choose by themselves.
        seed: of the inputs.
    """

    device: torch.device
    dtype: torch.dtype
    cells: tuple[Cell, ...]
    baselines: tuple[str, ...]
    repeats: int = 50
    candidates: bool = False
    seed: int = 0


@dataclass
class _Memory:
    """Baselines' figures by shape."""

    found: dict[tuple[int, ...], dict[str, Any]] = field(default_factory=dict)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """One entry a cell, as they are ready; what does not fit in memory says so."""
    memory = _Memory()
    for cell in settings.cells:
        torch.manual_seed(settings.seed)
        row: dict[str, Any] = {
            "cache": cell.cache,
            "heads": f"{cell.heads}/{cell.kv_heads}",
            "rows": cell.rows,
            "keys": cell.keys,
            "kernel": "triton" if settings.device.type == "cuda" else "torch twin",
            **_bound(cell, settings.device),
        }
        try:
            row |= _kernel(cell, settings)
            row["read_tb_per_s"] = graphs.read_bytes_per_s(settings.device) / 1e12
            row["tb_per_s"] = cell.bytes / row["ms"]["median"] / 1e9
            row["of_read"] = row["tb_per_s"] / row["read_tb_per_s"]
            row["share_of_bound"] = row["bound_ms"] / row["ms"]["median"]
            row |= _against(_baselines(cell, settings, memory), row["ms"]["median"])
        except torch.OutOfMemoryError as error:
            row["failed"] = f"out of memory: {str(error).partition('.')[0]}"
        ms, best = row.get("ms", {}).get("median"), row.get("best", {})
        log.info(
            "cache=%s heads=%s rows=%d keys=%d ms=%s speed=%s",
            *(row[name] for name in ("cache", "heads", "rows", "keys")),
            ms,
            best.get("speed"),
        )
        yield row
        timing.release(settings.device)


def _kernel(cell: Cell, settings: Settings) -> dict[str, Any]:
    """Time of the kernel, of its other tiles if asked for, and how far it is from its torch twin."""
    copies = graphs.copies_of(cell.bytes, settings.device)
    q_BHTD = _normal(settings, 1, cell.heads, cell.rows, cell.head_dim)
    mask, _ = _mask(cell, settings.device)
    scale = cell.head_dim**-0.5
    make = _dense if cell.cache == "dense" else _hier
    fast, plain, tiled = make(cell, settings, copies, q_BHTD, mask, scale)
    gap = _distance(fast(0), plain(0))
    how = {"calls": max(copies, 4), "repeats": settings.repeats}
    found: dict[str, Any] = {
        "ms": graphs.replayed(fast, settings.device, **how),
        "copies": copies,
        "relative_difference": gap,
    }
    if settings.candidates and settings.device.type == "cuda":
        found["tiles"] = [{"tile": str(tile), **_tried(work, settings.device, how)} for tile, work in tiled()]
    return found


def _dense(
    cell: Cell, settings: Settings, copies: int, q: Tensor, mask: Tensor | Causal, scale: float
) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor], Callable[[], Any]]:
    """The kernel, its twin, and the kernel by tile, as functions of the number of the cache."""
    shape = (1, cell.kv_heads, cell.keys + cell.rows, cell.head_dim)
    caches = [(_normal(settings, *shape), _normal(settings, *shape)) for _ in range(copies)]
    len_B = torch.tensor([cell.keys], device=settings.device)

    def with_tile(launch: Any, tile: Any, i: int) -> Tensor:
        return launch.tree_attention(q, *caches[i % copies], len_B, mask, scale, 0, None, tile)[0]

    def tiled() -> Iterator[tuple[Any, Callable[[int], Tensor]]]:
        from longtrain.kernels.tree_attention import launch

        for tile in launch.candidates(cell.rows * (cell.heads // cell.kv_heads)):
            yield tile, partial(with_tile, launch, tile)

    return (
        lambda i: tree_attention(q, *caches[i % copies], len_B, mask, scale=scale)[0],
        lambda i: plain_tree_attention(q, *caches[i % copies], len_B, mask, scale=scale)[0],
        tiled,
    )


def _hier(
    cell: Cell, settings: Settings, copies: int, q: Tensor, mask: Tensor | Causal, scale: float
) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor], Callable[[], Any]]:
    """As `_dense`, over planes of random codes and a ring of `RECENT` rows."""
    bits, blocks = BITS[cell.cache], (cell.keys - RECENT) // layout.BLOCK
    assert bits is not None
    sizes = {"n_layers": copies, "batch": 1, "n_kv_heads": cell.kv_heads, "head_dim": cell.head_dim}
    planes = layout.new_planes(**sizes, blocks=blocks, split=layout.Split.FLOOR, device=settings.device)  # type: ignore[arg-type]
    for codes in (planes.k_upper, planes.k_lower, planes.v_upper, planes.v_lower):
        codes.random_(0, 256)
    for numbers, low, high in (
        (planes.k_step, 0.1, 0.5),
        (planes.k_zero, -5.0, -1.0),
        (planes.v_step, 0.1, 0.3),
        (planes.v_zero, -2.0, -1.0),
    ):
        numbers.uniform_(low, high)
    ring = layout.new_ring(**sizes, device=settings.device, dtype=settings.dtype)  # type: ignore[arg-type]
    ring.k.normal_()
    ring.v.normal_()
    lens = layout.Lens(
        torch.tensor([cell.keys], device=settings.device), torch.tensor([blocks], device=settings.device)
    )
    layers = [(planes.layer(i), ring.layer(i)) for i in range(copies)]
    how: dict[str, Any] = {"bits": bits, "scale": scale}

    def with_tile(launch: Any, tile: Any, i: int) -> Tensor:
        return launch.hier_attention(q, *layers[i % copies], lens, mask, bits, scale, tile)[0]

    def tiled() -> Iterator[tuple[Any, Callable[[int], Tensor]]]:
        from longtrain.kernels.hierarchical import attention_launch as launch

        group = cell.heads // cell.kv_heads
        for tile in launch.candidates(cell.rows * group, bits, group, cell.head_dim, settings.dtype):
            yield tile, partial(with_tile, launch, tile)

    return (
        lambda i: hier_attention(q, *layers[i % copies], lens, mask, **how)[0],
        lambda i: plain_hier_attention(q, *layers[i % copies], lens, mask, **how)[0],
        tiled,
    )


def _tried(work: Callable[[int], Tensor], device: torch.device, how: dict[str, int]) -> dict[str, Any]:
    """A tile's time, or why it has none (a tile may ask for more than the device has)."""
    try:
        return {"ms": graphs.replayed(work, device, **how)}
    except Exception as error:  # triton's own kinds, by version
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}


def _baselines(cell: Cell, settings: Settings, memory: _Memory) -> dict[str, Any]:
    """Times of stock attention over a dense cache of the cell's shape, by name; measured once a shape."""
    key = (cell.heads, cell.kv_heads, cell.rows, cell.keys, cell.head_dim)
    if key in memory.found:
        return memory.found[key]
    timing.release(settings.device)
    shape = (1, cell.kv_heads, cell.keys + cell.rows, cell.head_dim)
    copies = graphs.copies_of(4 * cell.kv_heads * cell.keys * cell.head_dim, settings.device)
    caches = [(_normal(settings, *shape), _normal(settings, *shape)) for _ in range(copies)]
    q_BHTD = _normal(settings, 1, cell.heads, cell.rows, cell.head_dim)
    x = stock.Inputs(q_BHTD, *caches[0], cell.keys, _mask(cell, settings.device)[1])
    found: dict[str, Any] = {}
    for name in settings.baselines:
        try:
            work, exact = stock.attention_of(name, x)
            ms = graphs.replayed(
                lambda i, work=work: work(*caches[i % copies]),  # type: ignore[misc]
                settings.device,
                calls=copies,
                repeats=max(5, settings.repeats // 2),
            )
            found[name] = {"ms": ms, "exact": exact}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a backend that does not serve this shape says so in its own words
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    memory.found[key] = found
    return found


def _against(baselines: dict[str, Any], ms: float) -> dict[str, Any]:
    """The fastest baseline that computes the same thing, and the fastest that leaves out the mask."""
    row: dict[str, Any] = {"baselines": baselines}
    for title, exact in (("best", True), ("unmasked", False)):
        times = {name: x["ms"]["median"] for name, x in baselines.items() if x.get("exact") is exact}
        if times:
            name = min(times, key=lambda one: times[one])
            row[title] = {"name": name, "ms": times[name], "speed": times[name] / ms}
    return row


def _mask(cell: Cell, device: torch.device) -> tuple[Tensor | Causal, Tensor]:
    """The mask as the kernel takes it and as visible_BTT."""
    T = cell.rows
    visible_TT = torch.ones(T, T, dtype=torch.bool).tril()
    if T < 8:
        return CAUSAL, visible_TT[None].to(device)
    visible_TT = torch.eye(T, dtype=torch.bool)
    for row in range(1, T):
        visible_TT[row] |= visible_TT[int(torch.randint(row, ()))]
    return tree_bits(visible_TT[None]).to(device), visible_TT[None].to(device)


def _bound(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Least milliseconds of a call on this device."""
    gpu = gpu_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    seconds = cell.bytes / (gpu.bytes_per_s if gpu else timing.copy_bytes_per_s(device))
    if gpu:
        seconds = max(seconds, cell.flops / gpu.flops_per_s)
    by = f"data sheet of {gpu.name}" if gpu else "a plain copy"
    return {"bound_ms": 1e3 * seconds, "bound_by": by, "bytes": cell.bytes, "flops": cell.flops}


def _normal(settings: Settings, *shape: int) -> Tensor:
    return torch.randn(shape, device=settings.device, dtype=settings.dtype)


def _distance(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((got.float() - want.float()).norm() / want.float().norm())
