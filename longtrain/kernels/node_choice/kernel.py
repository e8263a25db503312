"""Triton kernels of `kernels.node_choice`, and their launches: one program for each sequence.

In a program, place x below N is a node of the draft, and place N + k is copied token k; place 0 is the root.
A program holds all of them in registers. Chosen are the places that fewer than `keep` others are ahead of,
which needs no sorting.

Shapes: as in `kernels.node_choice`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtrain.kernels.devices import launched_on

if TYPE_CHECKING:
    from longtrain.kernels.node_choice import Candidates, Rates

_RIVALS = 32
"""Places that all others are compared with at a time."""
_LEAST_PLACES = 32
"""A place for each thread of a warp: with fewer, the compiler makes gathers of many instructions."""
_SIZES = [
    *(f"{name}_{axis}" for name in ("token", "parent", "depth", "score") for axis in "bn"),
    *("copy_b", "copy_k", "B", "N", "K", "L", "Q"),
]
"""Arguments whose values are not compiled into a kernel."""
_NEVER = tl.constexpr(float("-inf"))
_LONGEST = tl.constexpr(2**31 - 1)


@triton.jit
def _least_above(value, parent, LEVELS: tl.constexpr):
    """The least value of each node and its ancestors, of which there are fewer than 2 ** LEVELS."""
    above = tl.maximum(parent, 0)
    for _ in tl.static_range(LEVELS):  # each round doubles how far up a node has looked
        value = tl.minimum(value, tl.gather(value, above, 0))
        above = tl.gather(above, above, 0)
    return value


@triton.jit
def _of_length(length, end_ptr, L, LENGTHS: tl.constexpr):
    """Mask [K, L]: the class of each match length."""
    kind = tl.arange(0, LENGTHS)
    above = tl.load(end_ptr + kind - 1, mask=(kind > 0) & (kind < L), other=-1).to(tl.int32)
    end = tl.load(end_ptr + kind, mask=kind < L - 1, other=_LONGEST).to(tl.int32)
    inside = (length[:, None] > above[None, :]) & (length[:, None] <= end[None, :])
    return inside & (kind < L)[None, :]


@triton.jit
def _confidence(score, step, Q):
    """Class of the confidence of nodes with these log-probabilities."""
    kind = tl.math.div_rn(score, tl.zeros_like(score) - step)
    return tl.minimum(tl.maximum(kind, 0.0), (Q - 1) * 1.0).to(tl.int32)


@triton.jit
def _log_rates(table_ptr, kind, B, Y):
    """Logarithm of the accepted share of each class; at most 0."""
    accepted = tl.load(table_ptr + kind, mask=kind < Y, other=1.0)
    tried = tl.load(table_ptr + B.to(tl.int64) * Y + kind, mask=kind < Y, other=1.0)
    return tl.minimum(tl.log(tl.math.div_rn(accepted, tried)), 0.0)


@triton.jit
def _add(table_ptr, kind, accepted, tried, B, Y):
    """Add the numbers of nodes of each class to a table."""
    seen_ptr = table_ptr + B.to(tl.int64) * Y
    before = tl.load(table_ptr + kind, mask=kind < Y)
    tl.store(table_ptr + kind, before + accepted.to(tl.float32), mask=kind < Y)
    before = tl.load(seen_ptr + kind, mask=kind < Y)
    tl.store(seen_ptr + kind, before + tried.to(tl.float32), mask=kind < Y)


@triton.jit(do_not_specialize=[*_SIZES, "keep"])
def _choose_kernel(
    token_ptr, parent_ptr, depth_ptr, score_ptr, copy_ptr, matched_ptr, copied_ptr, drafted_ptr, end_ptr,
    out_ptr, count_ptr,
    token_b, token_n, parent_b, parent_n, depth_b, depth_n, score_b, score_n, copy_b, copy_k,
    B, N, K, L, Q, keep, step,
    PLACES: tl.constexpr, LEVELS: tl.constexpr, COPIES: tl.constexpr, LENGTHS: tl.constexpr,
    CLASSES: tl.constexpr, RIVALS: tl.constexpr,
):  # fmt: skip
    """Choose the nodes of one sequence; out: tokens, parents and depths of the chosen nodes, [3, B, X]."""
    b = tl.program_id(0).to(tl.int64)
    x = tl.arange(0, PLACES)
    drafted, copied = x < N, (x >= N) & (x < N + K)
    token = tl.load(token_ptr + b * token_b + x * token_n, mask=drafted, other=-1)
    parent = tl.load(parent_ptr + b * parent_b + x * parent_n, mask=drafted, other=0).to(tl.int32)
    depth = tl.load(depth_ptr + b * depth_b + x * depth_n, mask=drafted, other=0).to(tl.int32)
    score = tl.load(score_ptr + b * score_b + x * score_n, mask=drafted, other=0.0).to(tl.float32)
    depth = tl.where(copied, x - N + 1, depth)
    reached = (depth > 0) & (depth <= K)
    text = tl.load(copy_ptr + b * copy_b + (depth - 1) * copy_k, mask=reached, other=-1)

    # what the copy says of a depth: the sum of the logarithms of its steps so far. All sums are formed in
    # the same order from terms of at most 0, so that no rounding makes a deeper place more probable
    along, length_kind = tl.arange(0, COPIES), tl.arange(0, LENGTHS)
    by_length = _of_length(tl.load(matched_ptr + b).to(tl.int32) + along, end_ptr, L, LENGTHS)
    length_rate = _log_rates(copied_ptr + b * L, length_kind, B, L)
    step_rate = tl.sum(tl.where(by_length, length_rate[None, :], 0.0), 1)
    by_copy = tl.sum(tl.where(along[None, :] < depth[:, None], step_rate[None, :], 0.0), 1)

    # what the draft says: no class is more probable than one of more confidence, no node than its parent
    kind = tl.arange(0, CLASSES)
    above_class = kind[None, :] <= _confidence(score, step, Q)[:, None]
    rate = tl.min(tl.where(above_class, _log_rates(drafted_ptr + b * Q, kind, B, Q)[None, :], 0.0), 1)
    by_draft = _least_above(tl.where(drafted, rate + 1e-3 * score, 0.0), parent, LEVELS)

    same = drafted & ((depth == 0) | (reached & (token == text)))
    through = _least_above(same.to(tl.int32), parent, LEVELS) > 0
    # the deepest node that the copy runs through, and of several the first
    deepest = tl.max(tl.where(through & drafted, depth * N + (N - 1 - x), -1), 0)
    shared, below = deepest // N, N - 1 - deepest % N
    by_draft = tl.maximum(by_draft, tl.where(through, by_copy, _NEVER))
    likely = tl.where(drafted, by_draft, tl.where(copied & (x - N >= shared), by_copy, _NEVER))

    rank = tl.zeros((PLACES,), tl.int32)
    for first in range(0, N + K, RIVALS):
        rival = first + tl.arange(0, RIVALS)
        rated = tl.gather(likely, rival, 0)[None, :]
        ahead = (rated > likely[:, None]) | ((rated == likely[:, None]) & (rival[None, :] < x[:, None]))
        rank += tl.sum((ahead & ((rival > 0) & (rival < N + K))[None, :]).to(tl.int32), 1)
    kept = (x > 0) & (drafted | copied) & (rank < keep)
    place = tl.cumsum(kept.to(tl.int32), 0)
    above = tl.where(x - N == shared, below, x - 1)
    above = tl.where(drafted, tl.maximum(parent, 0), tl.where(copied, above, 0))
    parent = tl.where(x > 0, tl.gather(place, above, 0), -1)
    written = kept | (x == 0)
    out_ptr += b * (keep + 1) + place
    part = B.to(tl.int64) * (keep + 1)
    tl.store(out_ptr, tl.where(copied, text, token), mask=written)
    tl.store(out_ptr + part, parent.to(tl.int64), mask=written)
    tl.store(out_ptr + 2 * part, depth.to(tl.int64), mask=written)
    tl.store(count_ptr + b, tl.sum((kept & copied).to(tl.int64), 0))


@triton.jit
def _text(depth, b, n, after, chosen_ptr, path_ptr, chosen_b, chosen_x, path_b, path_p):
    """The accepted tokens at some depths below the root; -1 behind the last."""
    inside = (depth > 0) & (depth < n)
    node = tl.load(path_ptr + b * path_b + depth * path_p, mask=inside, other=0)
    token = tl.load(chosen_ptr + b * chosen_b + node * chosen_x, mask=inside, other=-1)
    return tl.where(depth == n, after, token)


@triton.jit(do_not_specialize=[*_SIZES, "chosen_b", "chosen_x", "path_b", "path_p"])
def _learn_kernel(
    token_ptr, parent_ptr, depth_ptr, score_ptr, copy_ptr, matched_ptr, copied_ptr, drafted_ptr, end_ptr,
    chosen_ptr, path_ptr, n_ptr, next_ptr,
    token_b, token_n, parent_b, parent_n, depth_b, depth_n, score_b, score_n, copy_b, copy_k,
    chosen_b, chosen_x, path_b, path_p, B, N, K, L, Q, step,
    PLACES: tl.constexpr, LEVELS: tl.constexpr, COPIES: tl.constexpr, LENGTHS: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Update the tables of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    n, after = tl.load(n_ptr + b).to(tl.int32), tl.load(next_ptr + b)
    if n > 0:
        along, kind = tl.arange(0, COPIES), tl.arange(0, LENGTHS)
        copy = tl.load(copy_ptr + b * copy_b + along * copy_k, mask=along < K, other=-1)
        text = _text(along + 1, b, n, after, chosen_ptr, path_ptr, chosen_b, chosen_x, path_b, path_p)
        right = tl.min(tl.where((along < K) & (copy != text), along, K), 0)  # the copy's first right tokens
        by_length = _of_length(tl.load(matched_ptr + b).to(tl.int32) + along, end_ptr, L, LENGTHS)
        tried = (along <= right) & (along < n) & (along < K)
        accepted = tl.sum((by_length & (along < right)[:, None]).to(tl.int32), 0)
        _add(copied_ptr + b * L, kind, accepted, tl.sum((by_length & tried[:, None]).to(tl.int32), 0), B, L)

        x, kind = tl.arange(0, PLACES), tl.arange(0, CLASSES)
        drafted = x < N
        token = tl.load(token_ptr + b * token_b + x * token_n, mask=drafted, other=-1)
        parent = tl.load(parent_ptr + b * parent_b + x * parent_n, mask=drafted, other=0).to(tl.int32)
        depth = tl.load(depth_ptr + b * depth_b + x * depth_n, mask=drafted, other=0).to(tl.int32)
        score = tl.load(score_ptr + b * score_b + x * score_n, mask=drafted, other=0.0).to(tl.float32)
        text = _text(depth, b, n, after, chosen_ptr, path_ptr, chosen_b, chosen_x, path_b, path_p)
        same = drafted & ((depth == 0) | (token == text))
        through = _least_above(same.to(tl.int32), parent, LEVELS) > 0
        of_class = (_confidence(score, step, Q)[:, None] == kind[None, :]) & (drafted & (x > 0))[:, None]
        accepted = tl.sum((of_class & through[:, None]).to(tl.int32), 0)
        _add(drafted_ptr + b * Q, kind, accepted, tl.sum(of_class.to(tl.int32), 0), B, Q)


def choose(found: Candidates, rates: Rates, keep: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.node_choice.choose`."""
    (B, N), K = found.tokens_BN.shape, found.copy_BK.shape[1]
    places = max(_LEAST_PLACES, triton.next_power_of_2(N + K))
    out_3BX = torch.empty((3, B, keep + 1), dtype=torch.int64, device=found.copy_BK.device)
    copied_B1 = out_3BX.new_empty((B, 1))
    with launched_on(found.copy_BK):
        _choose_kernel[(B,)](
            *_pointers(found, rates), out_3BX, copied_B1, *_strides(found), *_sizes(found, rates), keep,
            rates.step, PLACES=places, RIVALS=_RIVALS, num_warps=min(8, places // 32),
            **_blocks(found, rates),
        )  # fmt: skip
    return out_3BX[0], out_3BX[1], out_3BX[2], copied_B1


def learn(
    found: Candidates, rates: Rates, tokens_BX: Tensor, path_BP: Tensor, n_B: Tensor, next_B: Tensor
) -> None:
    """See `kernels.node_choice.learn`."""
    B, N = found.tokens_BN.shape
    places = max(_LEAST_PLACES, triton.next_power_of_2(N))
    with launched_on(found.copy_BK):
        _learn_kernel[(B,)](
            *_pointers(found, rates), tokens_BX, path_BP, n_B.contiguous(), next_B.contiguous(),
            *_strides(found), *tokens_BX.stride(), *path_BP.stride(), *_sizes(found, rates), rates.step,
            PLACES=places, num_warps=min(8, places // 32), **_blocks(found, rates),
        )  # fmt: skip


def _pointers(found: Candidates, rates: Rates) -> tuple[Tensor, ...]:
    """The tensors that both kernels read."""
    return (
        found.tokens_BN, found.parents_BN, found.depth_BN, found.score_BN, found.copy_BK,
        found.matched_B.contiguous(), rates.copied_2BL, rates.drafted_2BQ, rates.ends_E,
    )  # fmt: skip


def _strides(found: Candidates) -> tuple[int, ...]:
    """Strides of those that may have any."""
    some = (found.tokens_BN, found.parents_BN, found.depth_BN, found.score_BN, found.copy_BK)
    return tuple(stride for tensor in some for stride in tensor.stride())


def _sizes(found: Candidates, rates: Rates) -> tuple[int, ...]:
    """B, N, K, L and Q."""
    return (
        *found.tokens_BN.shape, found.copy_BK.shape[1], rates.copied_2BL.shape[2], rates.drafted_2BQ.shape[2]
    )  # fmt: skip


def _blocks(found: Candidates, rates: Rates) -> dict[str, Any]:
    """Constants of both kernels."""
    return {
        "LEVELS": (found.tokens_BN.shape[1] - 1).bit_length(),
        "COPIES": triton.next_power_of_2(found.copy_BK.shape[1]),
        "LENGTHS": triton.next_power_of_2(rates.copied_2BL.shape[2]),
        "CLASSES": triton.next_power_of_2(rates.drafted_2BQ.shape[2]),
    }
