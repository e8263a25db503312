"""Launches the Triton kernels of `kernels.importance`: tiles, tables, partial buffers, and the autograd node.

The tiles are the `SpanTile` constants below; they were chosen for compute capability 9.0 at head dim 128 in
half precision (at most 16 bytes of registers are spilled there), and they shrink for larger head dims.

Shapes: see `kernels.importance`; M packed rows of a tile (queries x query heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtrain.kernels.devices import LOG2E, cores, dense_rows, launched_on, width_of
from longtrain.kernels.importance import backward as back
from longtrain.kernels.importance import kernel as front
from longtrain.kernels.importance.spans import Span, covers, key_items, most_rows, own_items, row_items


@dataclass(frozen=True)
class SpanTile:
    """Sizes of a kernel's tile and of its launch.

    Args:
        rows: packed rows, a power of two.
        keys: keys of a block, a power of two.
        warps: warps of a program.
        stages: blocks in flight.
        waves: programs to aim for, in multiples of the device's processors.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    waves: int


ATTEND = SpanTile(rows=128, keys=64, warps=8, stages=3, waves=1)
LSE = SpanTile(rows=128, keys=64, warps=8, stages=3, waves=4)
COLUMN_FEW = SpanTile(rows=128, keys=64, warps=8, stages=3, waves=2)
"""Column means of few queries, which fit in one tile; a program loops over the keys."""
COLUMN_MANY = SpanTile(rows=64, keys=128, warps=8, stages=3, waves=0)
"""Column means of more queries; a program has one block of keys and loops over the queries."""
QUERY = SpanTile(rows=128, keys=64, warps=8, stages=2, waves=1)
FLOAT = SpanTile(rows=32, keys=32, warps=8, stages=2, waves=0)
"""All of the above in fp32, whose products are plain multiply-adds: larger tiles would spill registers."""
OWN = SpanTile(rows=32, keys=32, warps=4, stages=1, waves=0)
OWN_FLOAT = SpanTile(rows=16, keys=16, warps=8, stages=1, waves=0)
"""Gradients of the queries' own keys and values, at every head dim."""
SPLITS = 32
"""Partial results that a merging program reads at once."""
CHUNK = 1
"""Packed rows of a merging program; interpreted programs take all of a tile, since each is slow to start."""
_DIM = 128
"""Head dim for which the tiles were chosen; a larger one halves them."""
_INTERPRETED = 8
"""Processors of the device when kernels are interpreted: enough to split, few enough to be fast."""


@dataclass(frozen=True)
class Grid:
    """A tile adapted to one call's shapes; `const` are the constants that all kernels have."""

    heads: int
    rows: int
    keys: int
    parts: int
    programs: int
    chunk: int
    const: dict[str, int]
    launch: dict[str, int]


def suffix_lse(
    q_NHD: Tensor, own_k_NGD: Tensor, k_BTGD: Tensor, spans: tuple[Span, ...], scale: float
) -> Tensor:
    """lse_NH in fp32; see `kernels.importance.suffix_lse`."""
    q, own_k = _rows(q_NHD, k_BTGD), _rows(own_k_NGD, k_BTGD)
    grid = _grid(LSE, q, k_BTGD, spans)
    items, blocks = row_items(spans, grid.rows, grid.keys, grid.programs, q.device)
    part = _empty(q, len(items), grid)
    with launched_on(q):
        front.attend_kernel[(len(items) * grid.parts,)](
            q, own_k, own_k, k_BTGD, k_BTGD, items, part, part, scale * LOG2E,
            *q.stride()[:2], *own_k.stride()[:2], 0, 0, *k_BTGD.stride()[:3], 0, 0, 0,
            **grid.const, KEYS=grid.keys, VALUES=False, **grid.launch,
        )  # fmt: skip
        lse_NH = q.new_empty(q.shape[:2], dtype=torch.float32)
        narrow = {name: grid.const[name] for name in ("PARTS", "GROUP", "HEADS", "ROWS")}
        front.merge_lse_kernel[(len(blocks) * grid.parts,)](part, blocks, lse_NH, **narrow, SPLITS=SPLITS)
    return lse_NH


def importance(
    q_NHD: Tensor, lse_NH: Tensor, k_BTGD: Tensor, spans: tuple[Span, ...], scale: float, maximum: bool
) -> Tensor:
    """s_BHT in fp32; see `kernels.importance.importance`."""
    q = _rows(q_NHD, k_BTGD)
    B, T = k_BTGD.shape[:2]
    new = torch.empty if covers(spans, B, T) else torch.zeros
    s_BHT = new(B, q.shape[1], T, dtype=torch.float32, device=q.device)
    grid = _grid(COLUMN_FEW, q, k_BTGD, spans)
    one = most_rows(spans) <= grid.rows
    if not one:
        grid = _grid(COLUMN_MANY, q, k_BTGD, spans)
    items = key_items(spans, grid.keys, grid.programs if one else 0, q.device)
    _columns(
        q, lse_NH, k_BTGD, k_BTGD.stride()[:3], s_BHT, s_BHT.stride(), items, scale, grid, one, max_=maximum
    )
    return s_BHT


def own_importance(
    q_NHD: Tensor, own_k_NGD: Tensor, lse_NH: Tensor, spans: tuple[Span, ...], scale: float
) -> Tensor:
    """s_NH in fp32; see `kernels.importance.own_importance`."""
    q, own_k = _rows(q_NHD, own_k_NGD), _rows(own_k_NGD, own_k_NGD)
    s_NH = q.new_empty(q.shape[:2], dtype=torch.float32)
    grid = _grid(COLUMN_MANY, q, own_k[None], spans)
    items = own_items(spans, grid.keys, q.device)
    strides = (0, 1, q.shape[1])
    _columns(q, lse_NH, own_k, (0, *own_k.stride()[:2]), s_NH, strides, items, scale, grid, False, own=True)
    return s_NH


def suffix_attention(
    q_NHD: Tensor,
    own_k_NGD: Tensor,
    own_v_NGD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    spans: tuple[Span, ...],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out_NHD and s_BHT; see `kernels.importance.suffix_attention`."""
    q, own_k, own_v = (_rows(x, k_BTGD) for x in (q_NHD, own_k_NGD, own_v_NGD))
    out_NHD, s_BHT = _SuffixAttention.apply(q, own_k, own_v, k_BTGD, v_BTGD.to(k_BTGD.dtype), spans, scale)
    return out_NHD.to(q_NHD.dtype), s_BHT


class _SuffixAttention(torch.autograd.Function):
    """Saves queries, output and lse; the backward reads K and V once more."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor, spans: tuple[Span, ...],
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        grid = _grid(ATTEND, q, k, spans)
        items, blocks = row_items(spans, grid.rows, grid.keys, grid.programs, q.device)
        part = _empty(q, len(items), grid)
        part_out = _empty(q, len(items), grid, grid.const["WIDTH"])
        out_NHD = q.new_empty(q.shape)
        lse_NH = q.new_empty(q.shape[:2], dtype=torch.float32)
        with launched_on(q):
            front.attend_kernel[(len(items) * grid.parts,)](
                q, own_k, own_v, k, v, items, part, part_out, scale * LOG2E,
                *q.stride()[:2], *own_k.stride()[:2], *own_v.stride()[:2], *k.stride()[:3], *v.stride()[:3],
                **grid.const, KEYS=grid.keys, VALUES=True, **grid.launch,
            )  # fmt: skip
            front.merge_out_kernel[_merging(blocks, grid)](
                part, part_out, blocks, lse_NH, out_NHD, **grid.const, CHUNK=grid.chunk, SPLITS=SPLITS
            )
        ctx.save_for_backward(q, own_k, own_v, k, v, out_NHD, lse_NH)
        ctx.spans, ctx.scale = spans, scale
        ctx.set_materialize_grads(False)
        return out_NHD, importance(q, lse_NH, k, spans, scale, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_s: Tensor | None) -> tuple[Tensor | None, ...]:
        q, own_k, own_v, k, v, out, lse = ctx.saved_tensors
        if d_out is None and d_s is None:
            return (None,) * 7
        unit = None
        if q.dtype == torch.float16:  # products of a weight and a small gradient would be lost
            top = [x.abs().amax().float() for x in (d_out, d_s) if x is not None]
            unit = torch.stack(top).amax().clamp_min(1e-30)
            d_out = None if d_out is None else (d_out / unit).to(q.dtype)
            d_s = None if d_s is None else d_s / unit
        grads = _backward(q, own_k, own_v, k, v, out, lse, d_out, d_s, ctx.spans, ctx.scale, unit is not None)
        if unit is not None:
            grads = [(x * unit).to(q.dtype) for x in grads]
        return (*grads, None, None, None, None)


def _backward(
    q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    d_out: Tensor | None, d_s: Tensor | None, spans: tuple[Span, ...], scale: float, wide: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, own_k and own_v; `wide`: computed in fp32."""
    grid = _grid(QUERY, q, k, spans)
    items, blocks = row_items(spans, grid.rows, grid.keys, grid.programs, q.device)
    given = {"OUT": d_out is not None, "SCORES": d_s is not None}
    part = _empty(q, len(items), grid, grid.const["WIDTH"])
    mean = torch.empty_like(part) if d_s is not None else part
    part_dot = _empty(q, len(items), grid)
    dtype = torch.float32 if wide else q.dtype
    d_q, dot = q.new_empty(q.shape, dtype=dtype), torch.empty_like(lse)
    d_k, d_v = (own_k.new_empty(own_k.shape, dtype=dtype) for _ in range(2))
    d_out = out if d_out is None else d_out.contiguous()
    d_s = lse if d_s is None else d_s.contiguous()
    strides = (*q.stride()[:2], *own_k.stride()[:2], *own_v.stride()[:2])
    with launched_on(q):
        back.query_kernel[(len(items) * grid.parts,)](
            q, own_k, own_v, k, v, out, lse, d_out, d_s, items, part, mean, part_dot, scale * LOG2E,
            k.shape[1], *strides, *k.stride()[:3], *v.stride()[:3],
            **grid.const, KEYS=grid.keys, **given, **grid.launch,
        )  # fmt: skip
        back.merge_query_kernel[_merging(blocks, grid)](
            part, mean, part_dot, blocks, d_q, dot, scale,
            **grid.const, CHUNK=grid.chunk, SPLITS=SPLITS, SCORES=given["SCORES"],
        )  # fmt: skip
        own = OWN_FLOAT if k.dtype == torch.float32 else OWN
        table, G = own_items(spans, own.keys, q.device), k.shape[2]
        sizes = {name: grid.const[name] for name in ("GROUP", "D", "WIDTH")}
        back.own_kernel[(len(table) * G,)](
            q, own_k, own_v, out, lse, d_out, dot, table, d_k, d_v, scale, scale * LOG2E, *strides,
            G=G, **sizes, ROWS=own.rows, KEYS=own.keys, **given, num_warps=own.warps, num_stages=own.stages,
        )  # fmt: skip
    return [d_q, d_k, d_v]


def _columns(
    q: Tensor, lse: Tensor, k: Tensor, k_strides: tuple[int, ...], s: Tensor, s_strides: tuple[int, ...],
    items: Tensor, scale: float, grid: Grid, one: bool, *, own: bool = False, max_: bool = False,
) -> None:  # fmt: skip
    """Compute s with the column kernel."""
    if not len(items):
        return
    with launched_on(q):
        front.column_kernel[(len(items) * grid.parts,)](
            q, lse.float().contiguous(), k, items, s, scale * LOG2E, *q.stride()[:2], *k_strides, *s_strides,
            **grid.const, KEYS=grid.keys, ONE=one, OWN=own, MAX=max_, **grid.launch,
        )  # fmt: skip


def _grid(tile: SpanTile, q: Tensor, k: Tensor, spans: tuple[Span, ...]) -> Grid:
    return _cut(tile, spans, q.shape[1], k.shape[2], q.shape[2], k.element_size(), q.device)


@lru_cache(maxsize=256)
def _cut(
    tile: SpanTile, spans: tuple[Span, ...], H: int, G: int, D: int, size: int, device: torch.device
) -> Grid:
    """Adapt a tile to these spans: short ones leave room for several heads, a large head dim shrinks it."""
    width = width_of(D)
    sizes = FLOAT if size == 4 else tile
    shrink = max(1, width // _DIM)
    packed, keys = max(16, sizes.rows // shrink), max(16, sizes.keys // shrink)
    heads, rows = _shape(spans, H // G, packed, tile)
    parts = G * -(-(H // G) // heads)
    return Grid(
        heads=heads,
        rows=rows,
        keys=keys,
        parts=parts,
        programs=max(1, cores(device, otherwise=_INTERPRETED) * tile.waves // parts),
        chunk=min(CHUNK, heads * rows) if device.type == "cuda" else heads * rows,
        const={"PARTS": parts, "GROUP": H // G, "D": D, "WIDTH": width, "HEADS": heads, "ROWS": rows},
        launch={"num_warps": sizes.warps, "num_stages": sizes.stages},
    )


def _shape(spans: tuple[Span, ...], group: int, packed: int, tile: SpanTile) -> tuple[int, int]:
    """Heads and queries of a tile of at most `packed` rows: the pair that wastes the least.

    A tile below 64 rows takes as long as one of 64. Among pairs of equal waste, more heads share the keys
    best; but in kernels that loop over queries, few heads make the sums over queries cheap, and in kernels
    that loop over keys, all queries must fit.
    """
    n = _power(most_rows(spans))
    most = packed // min(n, packed) if tile is COLUMN_FEW else packed // 8
    best = None
    for heads in (1 << i for i in range(min(_power(group), most).bit_length())):
        rows = max(min(max(8, n), packed // heads), 16 // heads)
        work = sum(-(-(s.rows[1] - s.rows[0]) // rows) * (s.keys[1] - s.keys[0] + 1) for s in spans)
        size = max(heads * rows, min(64, packed))
        cost = (-(-group // heads) * size * work, heads if tile is COLUMN_MANY else -heads)
        best = min(best or (cost, heads, rows), (cost, heads, rows))
    assert best is not None
    return best[1], best[2]


def _rows(x: Tensor, k: Tensor) -> Tensor:
    """The queries or keys in the prefix's dtype, with a contiguous last dim."""
    return dense_rows(x.to(k.dtype))


def _empty(q: Tensor, items: int, grid: Grid, *width: int) -> Tensor:
    return q.new_empty(items * grid.parts, grid.heads * grid.rows, *width, dtype=torch.float32)


def _merging(blocks: Tensor, grid: Grid) -> tuple[int]:
    """Number of programs that merge all packed rows."""
    return (len(blocks) * grid.parts * (grid.heads * grid.rows // grid.chunk),)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
