"""Triton kernels of `kernels.greedy`, and their launches.

Shapes: as in `kernels.greedy`; C chunks of a position's logits.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import chaining, dense_rows, launched_on

_COLUMNS = 2048
"""Columns of a program of the first pass."""
_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _best_kernel(x_ptr, top_ptr, at_ptr, x_m, V, COLUMNS: tl.constexpr, CHAINED: tl.constexpr):
    """The largest of a chunk of logits, and its lowest index."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * x_m + at, mask=at < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    top = tl.max(x, 0)
    out = row * tl.num_programs(1) + chunk
    tl.store(top_ptr + out, top)
    tl.store(at_ptr + out, tl.min(tl.where((x == top) & (at < V), at, _NONE), 0))


@triton.jit(do_not_specialize=["chunks"])
def _best_of_chunks_kernel(top_ptr, at_ptr, out_ptr, chunks, WIDTH: tl.constexpr, CHAINED: tl.constexpr):
    """The lowest index of the largest logit, over all chunks."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, WIDTH)
    inside = chunk < chunks
    top = tl.load(top_ptr + row * chunks + chunk, mask=inside, other=float("-inf"))
    at = tl.load(at_ptr + row * chunks + chunk, mask=inside, other=_NONE)
    tl.store(out_ptr + row, tl.min(tl.where(top == tl.max(top, 0), at, _NONE), 0).to(tl.int64))


@triton.jit
def _follow_kernel(
    best_ptr, token_ptr, parent_ptr, most_ptr, path_ptr, n_ptr, next_ptr,
    best_b, token_b, token_n, parent_b, parent_n, N,
    LEVELS: tl.constexpr, NODES: tl.constexpr, MOST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The accepted path of one tree."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, NODES)
    exists = at < N
    best = tl.load(best_ptr + b * best_b + at, mask=exists, other=-1)
    token = tl.load(token_ptr + b * token_b + at * token_n, mask=exists, other=-1)
    parent = tl.load(parent_ptr + b * parent_b + at * parent_n, mask=exists, other=-2)
    most = tl.load(most_ptr + b) if MOST else tl.full((), LEVELS + 2, tl.int64)
    node = tl.zeros((), tl.int32)
    n = tl.full((), 1, tl.int64)
    walks = n > 0
    chosen = tl.sum(tl.where(at == 0, best, 0), 0)
    cut = chosen
    path = path_ptr + b * (LEVELS + 1)
    tl.store(path, 0)
    for level in tl.static_range(LEVELS):
        child = tl.min(tl.where((parent == node) & (token == chosen), at, NODES), 0)
        walks = walks & (child < NODES)
        cut = tl.where(walks & (most == level + 1), chosen, cut)
        node = tl.where(walks, child, node)
        n += walks.to(tl.int64)
        tl.store(path + level + 1, tl.where(walks, node, 0).to(tl.int64))
        chosen = tl.where(walks, tl.sum(tl.where(at == node, best, 0), 0), chosen)
    tl.store(n_ptr + b, tl.minimum(n, most))
    tl.store(next_ptr + b, tl.where(n > most, cut, chosen))


@triton.jit
def _settle_kernel(
    token_ptr, path_ptr, n_ptr, next_ptr, root_ptr, left_ptr, len_ptr, out_ptr, made_ptr,
    token_b, token_n, path_b, B, P: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Finalise one path; `made`: the number of committed tokens, and the position of the first."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, WIDTH)
    n, left = tl.load(n_ptr + b), tl.load(left_ptr + b)
    after = tl.load(next_ptr + b)
    drafted = slot < n - 1
    node = tl.load(path_ptr + b * path_b + slot + 1, mask=slot < P - 1, other=0)
    token = tl.load(token_ptr + b * token_b + node * token_n, mask=drafted, other=0)
    out = out_ptr + b * (P + 2)
    tl.store(out, n)
    tl.store(out + 1, tl.sum((node > 0).to(tl.int64), 0))
    tl.store(out + 2 + slot, tl.where(drafted, token, after), mask=slot < P)
    committed = tl.minimum(n, left)
    tl.store(made_ptr + b, committed)
    tl.store(made_ptr + B + b, tl.load(len_ptr + b))
    tl.store(left_ptr + b, left - committed)
    tl.store(root_ptr + b, after)


@triton.jit
def _ancestors_kernel(
    parent_ptr, out_ptr, parent_b, parent_n, N, ROWS: tl.constexpr, NODES: tl.constexpr, CHAINED: tl.constexpr
):
    """Ancestor mask of some nodes of one tree: each walks up until it is above the root."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    node, at = tl.where(row < N, row, -1), tl.arange(0, NODES)
    seen = at[None, :] == node[:, None]
    while tl.max(node, 0) >= 0:
        parent = tl.load(parent_ptr + b * parent_b + node * parent_n, mask=node >= 0, other=-1)
        node = parent.to(tl.int32)
        seen = seen | (at[None, :] == node[:, None])
    keep = (row < N)[:, None] & (at < N)[None, :]
    tl.store(out_ptr + (b * N + row[:, None]) * N + at[None, :], seen.to(tl.uint8), mask=keep)


def argmax_rows(x_MV: Tensor) -> Tensor:
    """See `kernels.greedy.argmax_rows`."""
    M, V = x_MV.shape
    chunks = triton.cdiv(V, _COLUMNS)
    top_MC = torch.empty((M, chunks), dtype=torch.float32, device=x_MV.device)
    at_MC = torch.empty((M, chunks), dtype=torch.int32, device=x_MV.device)
    out_M = torch.empty(M, dtype=torch.int64, device=x_MV.device)
    chained = chaining(x_MV.device)
    with launched_on(x_MV):
        _best_kernel[(M, chunks)](x_MV, top_MC, at_MC, x_MV.stride(0), V, COLUMNS=_COLUMNS, **chained)
        _best_of_chunks_kernel[(M,)](
            top_MC, at_MC, out_M, chunks,
            WIDTH=triton.next_power_of_2(chunks), num_warps=1, **chained,
        )  # fmt: skip
    return out_M


def follow(
    best_BN: Tensor, tokens_BN: Tensor, parents_BN: Tensor, levels: int, most_B: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.greedy.follow`."""
    B, N = tokens_BN.shape
    best_BN = dense_rows(best_BN)
    path_BP = torch.empty((B, levels + 1), dtype=torch.int64, device=best_BN.device)
    n_B, next_B = path_BP.new_empty(B), path_BP.new_empty(B)
    chained = chaining(best_BN.device)
    with launched_on(best_BN):
        _follow_kernel[(B,)](
            best_BN, tokens_BN, parents_BN, n_B if most_B is None else most_B, path_BP, n_B, next_B,
            best_BN.stride(0), *tokens_BN.stride(), *parents_BN.stride(), N,
            LEVELS=levels, NODES=triton.next_power_of_2(max(N, 2)), MOST=most_B is not None,
            num_warps=1, **chained,
        )  # fmt: skip
    return path_BP, n_B, next_B


def settle(
    tokens_BN: Tensor, path_BP: Tensor, n_B: Tensor, next_B: Tensor, root_B: Tensor, left_B: Tensor,
    len_B: Tensor, out_BX: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `kernels.greedy.settle`."""
    B, P = path_BP.shape
    path_BP = dense_rows(path_BP)
    made_2B = torch.empty((2, B), dtype=torch.int64, device=n_B.device)
    chained = chaining(tokens_BN.device)
    with launched_on(tokens_BN):
        _settle_kernel[(B,)](
            tokens_BN, path_BP, n_B.contiguous(), next_B.contiguous(), root_B, left_B, len_B.contiguous(),
            out_BX, made_2B,
            *tokens_BN.stride(), path_BP.stride(0), B, P=P, WIDTH=triton.next_power_of_2(max(P, 2)),
            num_warps=1, **chained,
        )  # fmt: skip
    return made_2B[0], made_2B[1]


def ancestors(parents_BN: Tensor) -> Tensor:
    """See `kernels.greedy.ancestors`."""
    B, N = parents_BN.shape
    seen_BNN = torch.empty((B, N, N), dtype=torch.uint8, device=parents_BN.device)
    nodes = triton.next_power_of_2(max(N, 2))
    rows = min(16, nodes)
    chained = chaining(parents_BN.device)
    with launched_on(parents_BN):
        _ancestors_kernel[(B, triton.cdiv(N, rows))](
            parents_BN, seen_BNN, *parents_BN.stride(), N,
            ROWS=rows, NODES=nodes, num_warps=1, **chained,
        )  # fmt: skip
    return seen_BNN.view(torch.bool)
