"""The Triton kernels of `kernels.draft_loss`: a program for each position's logits.

Logits are read in blocks of COLUMNS. Maxima, sums and indices are accumulated for each column of the block
and only joined after the last block, so that the loops have no reduction across threads.

Shapes: as in `kernels.draft_loss`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(-3.0e38)
"""Below every logit, and finite: a difference from it is no NaN."""
_LEAST = tl.constexpr(1e-12)
"""As `reference.LEAST`."""

KL, LK, TV, LK_HYBRID, CE_TV = 0, 1, 2, 3, 4
"""Values of OBJECTIVE."""


@triton.jit
def _softmax_step(top, total, x):
    """Add logits to a running softmax: its maxima, and its sums relative to them."""
    new = tl.maximum(top, x)
    return new, total * tl.exp(top - new) + tl.exp(x - new)


@triton.jit
def _joined(top, total):
    """The logsumexp of a running softmax over all columns."""
    most = tl.max(top, 0)
    return most + tl.log(tl.sum(total * tl.exp(top - most), 0))


@triton.jit
def _lowest_of_largest(top, at):
    """The lowest index of the largest value."""
    return tl.min(tl.where(top == tl.max(top, 0), at, _NONE), 0)


@triton.jit
def _teacher_kernel(
    logit_ptr, ids_ptr, chosen_ptr, all_ptr, known_ptr, best_ptr, logit_b, V, K,
    IDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token: logsumexp and argmax over V, the logits of the draft's tokens and their logsumexp.

    Without IDS the draft's tokens are all, and their logits and logsumexp are not written again.
    """
    row = tl.program_id(0).to(tl.int64)
    logit_ptr += row * logit_b
    chosen_ptr += row * K
    column = tl.arange(0, COLUMNS)
    top = tl.full((COLUMNS,), _LOWEST, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    best = tl.zeros((COLUMNS,), tl.int32) + column
    for first in range(0, V, COLUMNS):
        at = first + column
        x = tl.load(logit_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
        best = tl.where(x > top, at, best)
        top, total = _softmax_step(top, total, x)
    tl.store(all_ptr + row, _joined(top, total))
    tl.store(best_ptr + row, _lowest_of_largest(top, best).to(tl.int64))
    if IDS:
        top = tl.full((COLUMNS,), _LOWEST, tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, K, COLUMNS):
            at = first + column
            inside = at < K
            token = tl.load(ids_ptr + at, mask=inside, other=0)
            x = tl.load(logit_ptr + token, mask=inside, other=float("-inf"))
            tl.store(chosen_ptr + at, x, mask=inside)
            top, total = _softmax_step(top, total, x.to(tl.float32))
        tl.store(known_ptr + row, _joined(top, total))


@triton.jit(do_not_specialize=["pair_j", "J", "B"])
def _passes_kernel(
    logit_ptr, chosen_ptr, all_ptr, known_ptr, best_ptr, ids_ptr, row_ptr, weight_ptr, value_ptr, hit_ptr,
    label_ptr, accept_ptr, factor, pair_j, J, B, K,
    OBJECTIVE: tl.constexpr, GRADIENT: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One pass of one token: the softmax of the draft, the loss, then the gradient in place of the logits.

    `factor` is the objective's own: the decay of the KL weight, or the share of the cross-entropy.
    Programs of one token are launched consecutively, so that the teacher's logits are found in the L2 cache.
    """
    WITH_KL: tl.constexpr = (OBJECTIVE == 0) or (OBJECTIVE == 3)
    token, j = (tl.program_id(0) // J).to(tl.int64), (tl.program_id(0) % J).to(tl.int64)
    pair = j * pair_j + token
    logit_ptr += (j * B + token) * K
    chosen_ptr += token * K
    column = tl.arange(0, COLUMNS)
    if tl.load(row_ptr + pair) < 0:
        tl.store(value_ptr + pair, 0.0)
        tl.store(hit_ptr + pair, tl.zeros((), tl.int8))
        if accept_ptr is not None:
            tl.store(accept_ptr + pair, 0.0)
        if GRADIENT:
            zeros = tl.zeros((COLUMNS,), logit_ptr.dtype.element_ty)
            for first in range(0, K, COLUMNS):
                tl.store(logit_ptr + first + column, zeros, mask=first + column < K)
    else:
        weight = tl.load(weight_ptr + pair)
        all_t, known_t = tl.load(all_ptr + token), tl.load(known_ptr + token)
        label, label_logit = tl.full((), -1, tl.int32), tl.zeros((), tl.float32)
        # read before the reductions: all threads have it when the first one overwrites it
        if OBJECTIVE == 4:
            label = tl.load(label_ptr + pair).to(tl.int32)
            label_logit = tl.load(logit_ptr + label).to(tl.float32)
        top = tl.full((COLUMNS,), _LOWEST, tl.float32)
        total, cross = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
        best = tl.zeros((COLUMNS,), tl.int32) + column
        for first in range(0, K, COLUMNS):
            at = first + column
            inside = at < K
            z = tl.load(logit_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
            best = tl.where(z > top, at, best)
            top, total = _softmax_step(top, total, z)
            if WITH_KL:
                t = tl.load(chosen_ptr + at, mask=inside, other=0.0).to(tl.float32)
                cross += tl.where(inside, tl.exp(t - known_t) * (t - z), 0.0)
        all_q = _joined(top, total)
        guess = _lowest_of_largest(top, best).to(tl.int64)
        if IDS:
            guess = tl.load(ids_ptr + guess)
        tl.store(hit_ptr + pair, (guess == tl.load(best_ptr + token)).to(tl.int8))
        kl = tl.sum(cross, 0) - known_t + all_q
        accept, below = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
        if OBJECTIVE != 0 or accept_ptr is not None:
            shares, smaller = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
            for first in range(0, K, COLUMNS):
                at = first + column
                inside = at < K
                z = tl.load(logit_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
                t = tl.load(chosen_ptr + at, mask=inside, other=0.0).to(tl.float32)
                q, p = tl.exp(z - all_q), tl.exp(t - all_t)
                shares += tl.minimum(p, q)
                smaller += tl.where(q < p, q, 0.0)
            accept, below = tl.sum(shares, 0), tl.sum(smaller, 0)
        mix = tl.exp(-factor * accept)
        if accept_ptr is not None:
            tl.store(accept_ptr + pair, accept)
        if OBJECTIVE == 0:
            value, slope = kl, weight
        elif OBJECTIVE == 1:
            accept = tl.maximum(accept, _LEAST)
            value, slope = -tl.log(accept), weight / accept
        elif OBJECTIVE == 2:
            value, slope = 1 - accept, weight
        elif OBJECTIVE == 3:
            value, slope = mix * kl + (1 - mix) * (1 - accept), weight * (1 - mix)
        else:
            value = factor * (all_q - label_logit) + (1 - factor) * (1 - accept)
            slope = weight * (1 - factor)
        tl.store(value_ptr + pair, value * weight)
        if GRADIENT:
            for first in range(0, K, COLUMNS):
                at = first + column
                inside = at < K
                z = tl.load(logit_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
                t = tl.load(chosen_ptr + at, mask=inside, other=0.0).to(tl.float32)
                q = tl.exp(z - all_q)
                if OBJECTIVE == 0:
                    grad = slope * (q - tl.exp(t - known_t))
                else:
                    grad = slope * (q * below - tl.where(q < tl.exp(t - all_t), q, 0.0))
                if OBJECTIVE == 3:
                    grad += weight * mix * (q - tl.exp(t - known_t))
                if OBJECTIVE == 4:
                    grad += weight * factor * tl.where(at == label, q - 1, q)
                tl.store(logit_ptr + at, grad.to(logit_ptr.dtype.element_ty), mask=inside)
