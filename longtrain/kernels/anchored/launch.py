"""Launches the Triton kernels of `kernels.anchored`: tiles, ranges of blocks, and the autograd node.

The tiles were chosen for compute capability 9.0 in half precision, so that no registers are spilled.

Shapes: as in `kernels.anchored`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtrain.kernels.anchored import kernel
from longtrain.kernels.devices import LOG2E, launched_on, shared_bytes, width_of


def tile(rows: int, keys: int, warps: int, stages: int) -> dict[str, int]:
    """Constants and options of a launch: packed rows and keys of a program's tile, powers of two."""
    return {"ROWS": rows, "KEYS": keys, "num_warps": warps, "num_stages": stages}


TILES = {
    64: (tile(128, 64, 4, 3), tile(128, 64, 8, 3), tile(64, 128, 8, 2)),
    128: (tile(128, 64, 8, 3), tile(128, 64, 8, 2), tile(32, 128, 8, 2)),
    256: (tile(128, 32, 8, 2), tile(32, 32, 4, 2), tile(32, 32, 8, 2)),
}
"""Largest head dim -> tiles of the output, of the gradient of queries, and of that of keys and values."""
_ROWS_OF = (("ROWS", "KEYS", 1), ("ROWS", "KEYS", 2), ("KEYS", "ROWS", 2))
"""For the kernels in the order of `TILES`: the constant with the rows of the tiles that a program holds all
the time, the one with the rows of the two tiles that it loads in each stage, and how many it holds."""
_MORE_SHARED = 2048
"""Bytes of shared memory beside the tiles, at most."""
FLOAT = (tile(32, 32, 4, 1),) * 3
"""In fp32, which is for triton's interpreter: small, so that small tests have several tiles."""


class Anchored(torch.autograd.Function):
    """`kernels.anchored.anchored_attention`, where blocks see shared keys low <= c < high."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor,
        low_N: Tensor, high_N: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        """The output; for the backward its lse is saved, and the tables."""
        given = tuple(x.contiguous() for x in (q, own_k, own_v, k, v))
        N, R, H, D = q.shape
        G = k.shape[1]
        constants = {"G": G, "GROUP": H // G, "R": R, "D": D, "WIDTH": width_of(D)}
        mine, _, last = tiles(D, q.dtype, shared_bytes(q.device))
        low, high, ranges = _table(low_N, high_N, len(k), last["KEYS"], q.device)
        rows = N * R * (H // G)
        out, lse = torch.empty_like(given[0]), q.new_empty(G * rows, dtype=torch.float32)
        if rows:
            with launched_on(q):
                kernel.forward_kernel[(triton.cdiv(rows, mine["ROWS"]), G)](
                    *given, low, high, out, lse, scale * LOG2E, rows, **constants, **mine
                )
        ctx.save_for_backward(*given, out, lse, low, high, ranges)
        ctx.settings = (constants, scale, rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the queries first, because delta = rowsum(dO * O) comes with them."""
        q, own_k, own_v, k, v, out, lse, low, high, ranges = ctx.saved_tensors
        constants, scale, rows = ctx.settings
        grad, delta = grads[0].contiguous(), torch.empty_like(lse)
        _, mine, last = tiles(q.shape[-1], q.dtype, shared_bytes(q.device))
        wanted = any(ctx.needs_input_grad[3:5])
        dq, *made = (torch.empty_like(x) for x in (q, own_k, own_v, *(k, v) * wanted))
        scales, G = (scale, scale * LOG2E), constants["G"]
        with launched_on(q):
            if rows:
                kernel.queries_kernel[(triton.cdiv(rows, mine["ROWS"]), G)](
                    grad, q, out, lse, own_k, own_v, k, v, low, high, dq, delta, *scales, rows,
                    **constants, **mine,
                )  # fmt: skip
            pairs = [(True, own_k.flatten(0, 1), own_v.flatten(0, 1), *made[:2])]
            for own, one_k, one_v, dk, dv in (*pairs, *[(False, k, v, *made[2:])] * wanted):
                if len(one_k):
                    kernel.keys_kernel[(triton.cdiv(len(one_k), last["KEYS"]), G)](
                        grad, q, lse, delta, one_k, one_v, low, high, ranges, dk, dv, *scales,
                        rows, len(one_k), OWN=own, **constants, **last,
                    )  # fmt: skip
        return (dq, *made, *[None] * (7 - len(made)))


def tiles(head_dim: int, dtype: torch.dtype, shared: int) -> list[dict[str, int]]:
    """Tiles of the output, of the gradient of queries, and of that of keys and values.

    Fewer are in flight on a GPU whose programs have little shared memory, of which `shared` is the limit.
    """
    if dtype == torch.float32:
        return [*FLOAT]
    chosen = next(found for most, found in TILES.items() if head_dim <= most)
    row, found = 2 * width_of(head_dim), []
    for one, (held, loaded, count) in zip(chosen, _ROWS_OF, strict=True):
        rest = shared - _MORE_SHARED - count * one[held] * row
        found.append({**one, "num_stages": max(1, min(one["num_stages"], rest // (2 * one[loaded] * row)))})
    return found


def _table(
    low_N: Tensor, high_N: Tensor, keys: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of the blocks, and `ranges` of `keys_kernel` for tiles of `size` keys, by one copy; int32."""
    first = torch.arange(0, keys, size)
    last = (first + size).clamp(max=keys)
    ranges = (
        torch.searchsorted(high_N, first, right=True),
        torch.searchsorted(high_N, last),
        torch.searchsorted(low_N, first, right=True),
        torch.searchsorted(low_N, last),
    )
    table = torch.cat((low_N, high_N, torch.stack(ranges, 1).flatten())).int()
    # page-locked, so that the host does not wait for a GPU
    table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
    low, high, flat = table.split([len(low_N), len(high_N), 4 * len(first)])
    return low, high, flat
