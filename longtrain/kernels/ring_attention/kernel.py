"""Triton kernel of `kernels.ring_attention`, and its launch: one tile of keys per program, then a merge.

Rows are packed as in `kernels.tree_attention.kernel`: m = i * GROUP + r is node i under query head r of one
KV head; partial results have the same layout too.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import LOG2E, chaining, launched_on, partial_results, width_of
from longtrain.kernels.tree_attention.launch import merge

_KEYS = 64
"""Buffer positions of a program."""
_ROWS = 64
"""Most packed rows of a program."""


@triton.jit(do_not_specialize=["T", "N", "splits", "ahead"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, since_ptr, len_ptr, sees_ptr, out_ptr, lse_ptr, scale2, T, N, splits, ahead,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, sees_b, sees_t, sees_n,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Partial out [ROWS, WIDTH] and base-2 lse [ROWS] of a tile of rows over one tile of keys, in fp32."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.cdiv(T * GROUP, ROWS)
    pid, split = tl.program_id(0), tl.program_id(1)
    kv, b = (pid // tiles % G).to(tl.int64), (pid // (tiles * G)).to(tl.int64)
    m = pid % tiles * ROWS + tl.arange(0, ROWS)
    node, exists = m // GROUP, m < T * GROUP
    dim, slot = tl.arange(0, WIDTH), split * KEYS + tl.arange(0, KEYS)
    wide = (dim < D)[None, :]
    held = (slot < SINKS + WINDOW + N)[:, None] & wide
    k_at = b * k_b + kv * k_g + slot.to(tl.int64)[:, None] * k_s + dim[None, :]
    v_at = b * v_b + kv * v_g + slot.to(tl.int64)[:, None] * v_s + dim[None, :]
    k = tl.load(k_ptr + k_at, mask=held, other=0.0)
    v = tl.load(v_ptr + v_at, mask=held, other=0.0)
    head = kv * GROUP + m % GROUP
    q_at = b * q_b + head * q_h + node * q_t
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=exists[:, None] & wide, other=0.0)

    length, since = tl.load(len_ptr + b), tl.load(since_ptr + b)
    turn = slot - SINKS
    pos = length - 1 - (tl.maximum(length - SINKS, 0) - 1 - turn + WINDOW) % WINDOW
    ring = (
        (turn >= 0) & (turn < WINDOW) & (pos >= tl.maximum(since, SINKS)) & (pos >= length + ahead - WINDOW)
    )
    if SINKS:
        ring = ring | ((slot < SINKS) & (slot < length))
    other = turn - WINDOW
    sees_at = b * sees_b + node.to(tl.int64)[:, None] * sees_t + other[None, :] * sees_n
    is_node = exists[:, None] & ((other >= 0) & (other < N))[None, :]
    seen = ring[None, :] | (tl.load(sees_ptr + sees_at, mask=is_node, other=0) != 0)

    logit = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale2, float("-inf"))
    top = tl.max(logit, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(logit - base[:, None])
    total = tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    at = (pid * splits + split).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(lse_ptr + at, top + tl.log2(total), mask=exists)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + at[:, None] * WIDTH + dim[None, :], acc, mask=exists[:, None])


def ring_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    bounds: tuple[Tensor, Tensor],
    sees_BTN: Tensor,
    *,
    window: int,
    ahead: int,
    scale: float,
    sinks: int,
) -> Tensor:
    """See `kernels.ring_attention.ring_attention`."""
    B, H, T, D = q_BHTD.shape
    G, N = k_BGSD.shape[1], sees_BTN.shape[-1]
    rows = min(_ROWS, max(16, triton.next_power_of_2(T * (H // G))))
    programs, splits = B * G * -(-T * (H // G) // rows), -(-(sinks + window + N) // _KEYS)
    width = width_of(D)
    part_lse, part_out = partial_results(q_BHTD, programs * splits * rows, width)
    sees = sees_BTN.view(torch.uint8)
    chained = chaining(q_BHTD.device)
    with launched_on(q_BHTD):
        _attend_kernel[(programs, splits)](
            q_BHTD, k_BGSD, v_BGSD, *bounds, sees, part_out, part_lse, scale * LOG2E, T, N, splits, ahead,
            *q_BHTD.stride()[:3], *k_BGSD.stride()[:3], *v_BGSD.stride()[:3], *sees.stride(),
            WINDOW=window, SINKS=sinks, G=G, GROUP=H // G, D=D, WIDTH=width, ROWS=rows, KEYS=_KEYS,
            num_warps=4, **chained,
        )  # fmt: skip
        return merge(q_BHTD, part_out, part_lse, G=G, rows=rows, splits=splits)[0]
