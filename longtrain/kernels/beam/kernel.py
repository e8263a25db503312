"""Triton kernels of `kernels.beam`, and their launches: per chunk of a node's logits, per node, per level.

A number and its index make one 64-bit key whose order is that of the numbers, lowest index first among equal
ones; a program selects the best by repeatedly taking the largest key.

Shapes: as in `kernels.beam`; R = B M nodes, C chunks of a node's logits, F = min(K, V) continuations of a
node.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.beam.tree import ExpandingTree
from longtrain.kernels.devices import chaining, launched_on

_COLUMNS = 1024
"""Columns of a program of the first pass, which is one warp."""
_LEAST = tl.constexpr(-(2**63))
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _key(x, at):
    """Key of fp32 numbers at indices below 2^31."""
    bits = x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & _FAR)
    return (order.to(tl.int64) << 32) | (at ^ _FAR).to(tl.int64)


@triton.jit
def _number(key):
    """The number of a key."""
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & _FAR)).to(tl.float32, bitcast=True)


@triton.jit
def _place(key):
    """The index of a key."""
    return (key & _FAR).to(tl.int32) ^ _FAR


@triton.jit
def _chunk_kernel(
    x_ptr, key_ptr, top_ptr, sum_ptr, x_m, V, temperature,
    F: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of exponentials and the F best keys of a chunk of a node's logits."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * x_m + at, mask=at < V, other=float("-inf")).to(tl.float32) / temperature
    x = tl.where(x == x, x, float("-inf"))
    out = row * tl.num_programs(1) + chunk
    top = tl.max(x, 0)
    tl.store(top_ptr + out, top)
    tl.store(sum_ptr + out, tl.sum(tl.exp(x - tl.where(top > float("-inf"), top, 0.0)), 0))
    key = tl.where(at < V, _key(x, at), _LEAST)
    for i in range(F):
        best = tl.max(key, 0)
        tl.store(key_ptr + out * F + i, best)
        key = tl.where(key == best, _LEAST, key)


@triton.jit(do_not_specialize=["chunks"])
def _node_kernel(
    key_ptr, top_ptr, sum_ptr, score_ptr, total_ptr, token_ptr, chunks,
    F: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Scores and tokens of the F best continuations of a node, none of them above the node's own score."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk, at = tl.arange(0, CHUNKS), tl.arange(0, WIDTH)
    top = tl.load(top_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    part = tl.load(sum_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    key = tl.load(key_ptr + row * chunks * F + at, mask=at < chunks * F, other=_LEAST)
    most = tl.max(top, 0)
    score = tl.load(score_ptr + row).to(tl.float32)
    shift = score - most - tl.log(tl.sum(part * tl.exp(top - most), 0))
    for i in range(F):
        best = tl.max(key, 0)
        # the sum may be rounded to more than the node's score; `minimum` passes over NaN
        tl.store(total_ptr + row * F + i, tl.minimum(_number(best) + shift, score))
        tl.store(token_ptr + row * F + i, _place(best))
        key = tl.where(key == best, _LEAST, key)


@triton.jit(do_not_specialize=["count", "above", "first", "N"])
def _level_kernel(
    total_ptr, token_ptr, id_ptr, out_token_ptr, out_parent_ptr, out_score_ptr,
    tree_token_ptr, tree_parent_ptr, tree_sees_ptr, count, above, first, N,
    K: tl.constexpr, F: tl.constexpr, WIDTH: tl.constexpr, CHILDREN: tl.constexpr, NODES: tl.constexpr,
    ADDED: tl.constexpr, IDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The K best continuations among the `count` of all nodes of a sequence.

    ADDED above 0: that many of the best also become nodes `first, ...` of its tree of N nodes, as children of
    nodes `above, ...`. CHILDREN and NODES are K and N rounded up to powers of 2.
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    total = tl.load(total_ptr + b * count + at, mask=at < count, other=0.0)
    key = tl.where(at < count, _key(total, at), _LEAST)
    child = tl.arange(0, CHILDREN)
    chosen = tl.full((CHILDREN,), 0, tl.int64)
    for i in range(K):
        best = tl.max(key, 0)
        chosen = tl.where(child == i, best, chosen)
        key = tl.where(key == best, _LEAST, key)
    real, place = child < K, _place(chosen)
    token = tl.load(token_ptr + b * count + place, mask=real, other=0).to(tl.int64)
    if IDS:
        token = tl.load(id_ptr + token, mask=real, other=0)
    parent = (place // F).to(tl.int64)
    tl.store(out_token_ptr + b * K + child, token, mask=real)
    tl.store(out_parent_ptr + b * K + child, parent, mask=real)
    tl.store(out_score_ptr + b * K + child, _number(chosen), mask=real)
    if ADDED:
        at, added, node = b * N + first + child, child < ADDED, tl.arange(0, NODES)
        tl.store(tree_token_ptr + at, token, mask=added)
        tl.store(tree_parent_ptr + at, parent + above, mask=added)
        inside = added[:, None] & (node < N)[None, :]
        seen = tree_sees_ptr + (b * N + above + parent)[:, None] * N + node[None, :]
        sees = tl.load(seen, mask=inside, other=0) | (node[None, :] == (first + child)[:, None]).to(tl.uint8)
        tl.store(tree_sees_ptr + at[:, None] * N + node[None, :], sees, mask=inside)


def best_continuations(
    logits_BMV: Tensor, score_BM: Tensor, width: int, temperature: float, ids_V: Tensor | None,
    tree: ExpandingTree | None, above: int, added: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `kernels.beam.best_continuations`."""
    B, M, V = logits_BMV.shape
    x_RV = logits_BMV.reshape(B * M, V)
    few, chunks = min(width, V), triton.cdiv(V, _COLUMNS)
    key_RCF = x_RV.new_empty((B * M, chunks, few), dtype=torch.int64)
    top_RC, sum_RC = x_RV.new_empty((2, B * M, chunks), dtype=torch.float32).unbind(0)
    total_RF = x_RV.new_empty((B * M, few), dtype=torch.float32)
    token_RF = x_RV.new_empty((B * M, few), dtype=torch.int32)
    out_BK, parent_BK = x_RV.new_empty((2, B, width), dtype=torch.int64).unbind(0)
    best_BK = x_RV.new_empty((B, width), dtype=torch.float32)
    chained = chaining(x_RV.device)
    if tree is None:
        places, N, added = (out_BK, parent_BK, out_BK), 1, 0
    else:
        places = (tree.tokens_BN, tree.parents_BN, tree.sees_BNN.view(torch.uint8))
        N = tree.tokens_BN.shape[1]
    children, width_N = triton.next_power_of_2(width), triton.next_power_of_2(N)
    nodes, level = triton.next_power_of_2(chunks * few), triton.next_power_of_2(M * few)
    with launched_on(x_RV):
        _chunk_kernel[(B * M, chunks)](
            x_RV, key_RCF, top_RC, sum_RC, x_RV.stride(0), V, temperature,
            F=few, COLUMNS=_COLUMNS, num_warps=1, **chained,
        )  # fmt: skip
        _node_kernel[(B * M,)](
            key_RCF, top_RC, sum_RC, score_BM.contiguous(), total_RF, token_RF, chunks,
            F=few, WIDTH=nodes, CHUNKS=triton.next_power_of_2(chunks),
            num_warps=max(1, min(8, nodes // 512)), **chained,
        )  # fmt: skip
        _level_kernel[(B,)](
            total_RF, token_RF, out_BK if ids_V is None else ids_V, out_BK, parent_BK, best_BK, *places,
            M * few, above, above + M, N,
            K=width, F=few, WIDTH=level, CHILDREN=children, NODES=width_N, ADDED=added, IDS=ids_V is not None,
            num_warps=max(1, min(8, max(level // 512, children * width_N // 1024))), **chained,
        )  # fmt: skip
    return out_BK, parent_BK, best_BK
