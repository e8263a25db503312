"""Triton kernels of `suffix_attention`'s backward; the layout is that of `kernels.importance.kernel`.

With g_ij = p_ij (d_out_i·v_j + w_j - delta_i - D_i), where w_j = d_s_j / n on prefix keys and 0 on own ones,
delta_i = d_out_i·out_i and D_i = sum_j p_ij w_j:
dq_i = scale sum_j g_ij k_j, d own_k_c = scale sum_i g_ic q_i, d own_v_c = sum_i p_ic d_out_i.
D_i is known only after all keys, so one pass collects sum_j p (d_out·v + w - delta) k, sum_j p k and D_i.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from longtrain.kernels.importance.kernel import _LOG2E, _heads, _load, _rows_of


@triton.jit
def query_kernel(
    q_ptr, own_k_ptr, own_v_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, d_out_ptr, d_s_ptr, items_ptr,
    part_grad_ptr, part_mean_ptr, part_dot_ptr, scale2, slots,
    q_n, q_h, ok_n, ok_g, ov_n, ov_g, k_b, k_t, k_g, v_b, v_t, v_g,
    PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, OUT: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Partial sums of a block of queries over an item's keys, in fp32. OUT: d_out is given; SCORES: d_s is.

    d_s_BHT is contiguous with `slots` keys and not yet divided by the number of queries.
    """
    M: tl.constexpr = HEADS * ROWS
    sets: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    H: tl.constexpr = PARTS // sets * GROUP
    pid = tl.program_id(0).to(tl.int64)
    item = items_ptr + pid // PARTS * 8
    kv, head, row, exists = _heads((pid % PARTS).to(tl.int32), GROUP, HEADS, ROWS)
    row += tl.load(item)
    keep = exists & (row < tl.load(item + 1))
    seq = tl.load(item + 2).to(tl.int64)
    low, high = tl.load(item + 3), tl.load(item + 4)
    own_low, own_high = tl.load(item + 5), tl.load(item + 6)
    share = 1.0 / tl.load(item + 7).to(tl.float32)
    dim, n = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    index = row.to(tl.int64) * H + head
    at = (row.to(tl.int64) * q_n + head.to(tl.int64) * q_h)[:, None] + dim[None, :]
    q = _load(q_ptr + at, keep, dim, D, WIDTH)
    lse2 = tl.load(lse_ptr + index, mask=keep, other=float("inf")) * _LOG2E
    grad = tl.zeros((M, WIDTH), tl.float32)
    mean = tl.zeros((M, WIDTH), tl.float32)
    dot = tl.zeros((M,), tl.float32)
    d_out, delta = q, lse2
    if OUT:
        d_out = _load(d_out_ptr + index[:, None] * D + dim[None, :], keep, dim, D, WIDTH)
        out = _load(out_ptr + index[:, None] * D + dim[None, :], keep, dim, D, WIDTH)
        delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)

    k_at = k_ptr + seq * k_b + kv * k_g + (low + n).to(tl.int64)[:, None] * k_t + dim[None, :]
    v_at = v_ptr + seq * v_b + kv * v_g + (low + n).to(tl.int64)[:, None] * v_t + dim[None, :]
    local = (pid % sets).to(tl.int32) * HEADS + tl.arange(0, HEADS)
    w_at = d_s_ptr + (seq * H + kv * GROUP + local)[:, None] * slots + (low + n)[None, :]
    there = (local < GROUP)[:, None]
    for start in range(low, high, KEYS):
        inside = n < high - start
        k = _load(k_at, inside, dim, D, WIDTH)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse2[:, None])
        p = tl.where(inside[None, :], p, 0.0)
        g = tl.zeros((M, KEYS), tl.float32)
        if OUT:
            v = _load(v_at, inside, dim, D, WIDTH)
            g = tl.dot(d_out, tl.trans(v), input_precision="ieee") - delta[:, None]
            v_at += KEYS * v_t
        if SCORES:
            w = tl.load(w_at, mask=inside[None, :] & there, other=0.0) * share
            w = tl.reshape(tl.broadcast_to(w[:, None, :], (HEADS, ROWS, KEYS)), (M, KEYS))
            g += w
            dot += tl.sum(p * w, 1)
            mean = tl.dot(p.to(k.dtype), k, mean, input_precision="ieee")
            w_at += KEYS
        grad = tl.dot((p * g).to(k.dtype), k, grad, input_precision="ieee")
        k_at += KEYS * k_t

    k_at = own_k_ptr + kv * ok_g + (own_low + n).to(tl.int64)[:, None] * ok_n + dim[None, :]
    v_at = own_v_ptr + kv * ov_g + (own_low + n).to(tl.int64)[:, None] * ov_n + dim[None, :]
    for start in tl.range(own_low, own_high, KEYS, num_stages=1):
        k = _load(k_at, n < own_high - start, dim, D, WIDTH)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse2[:, None])
        p = tl.where((start + n)[None, :] <= row[:, None], p, 0.0)
        if OUT:
            v = _load(v_at, n < own_high - start, dim, D, WIDTH)
            g = tl.dot(d_out, tl.trans(v), input_precision="ieee") - delta[:, None]
            grad = tl.dot((p * g).to(k.dtype), k, grad, input_precision="ieee")
            v_at += KEYS * ov_n
        if SCORES:
            mean = tl.dot(p.to(k.dtype), k, mean, input_precision="ieee")
        k_at += KEYS * ok_n

    slot = pid * M + tl.arange(0, M)
    tl.store(part_grad_ptr + slot[:, None] * WIDTH + dim[None, :], grad)
    if SCORES:
        tl.store(part_mean_ptr + slot[:, None] * WIDTH + dim[None, :], mean)
        tl.store(part_dot_ptr + slot, dot)


@triton.jit
def merge_query_kernel(
    part_grad_ptr, part_mean_ptr, part_dot_ptr, blocks_ptr, d_q_ptr, dot_ptr, scale,
    PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Add up the items' partial sums of CHUNK packed rows (a query and a head each): the queries' gradient
    d_q_NHD, and D_NH, the D_i of the module's formula.
    """
    index, keep, slot, count = _rows_of(blocks_ptr, PARTS, GROUP, HEADS, ROWS, CHUNK, SPLITS)
    dim, split = tl.arange(0, WIDTH), tl.arange(0, SPLITS)
    grad = tl.zeros((CHUNK, WIDTH), tl.float32)
    mean = tl.zeros((CHUNK, WIDTH), tl.float32)
    dot = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, count, SPLITS):
        inside = (split < count - start)[:, None]
        at = slot[:, :, None] * WIDTH + dim[None, None, :]
        grad += tl.sum(tl.load(part_grad_ptr + at, mask=inside[:, :, None], other=0.0), 0)
        if SCORES:
            mean += tl.sum(tl.load(part_mean_ptr + at, mask=inside[:, :, None], other=0.0), 0)
            dot += tl.sum(tl.load(part_dot_ptr + slot, mask=inside, other=0.0), 0)
        slot += SPLITS * PARTS * HEADS * ROWS
    if SCORES:
        grad -= dot[:, None] * mean
        tl.store(dot_ptr + index, dot, mask=keep)
    d_q = (grad * scale).to(d_q_ptr.dtype.element_ty)
    tl.store(d_q_ptr + index[:, None] * D + dim[None, :], d_q, mask=keep[:, None] & (dim < D)[None, :])


@triton.jit
def own_kernel(
    q_ptr, own_k_ptr, own_v_ptr, out_ptr, lse_ptr, d_out_ptr, dot_ptr, items_ptr, d_k_ptr, d_v_ptr,
    scale, scale2, q_n, q_h, ok_n, ok_g, ov_n, ov_g,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, OUT: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Gradients NGD of one block of own keys and values of one KV head, over all queries that see them."""
    pid = tl.program_id(0).to(tl.int64)
    item, kv = items_ptr + pid // G * 6, pid % G
    low, high = tl.load(item + 1), tl.load(item + 2)
    row_high = tl.load(item + 4)
    dim, n, r = tl.arange(0, WIDTH), tl.arange(0, KEYS), tl.arange(0, ROWS)
    col = low + n
    inside = col < high
    k = _load(own_k_ptr + kv * ok_g + col.to(tl.int64)[:, None] * ok_n + dim[None, :], inside, dim, D, WIDTH)
    v = k
    if OUT:
        v = _load(
            own_v_ptr + kv * ov_g + col.to(tl.int64)[:, None] * ov_n + dim[None, :], inside, dim, D, WIDTH
        )
    d_k = tl.zeros((KEYS, WIDTH), tl.float32)
    d_v = tl.zeros((KEYS, WIDTH), tl.float32)
    for local in range(GROUP):
        head = kv * GROUP + local
        for start in range(low, row_high, ROWS):
            row = (start + r).to(tl.int64)
            keep = row < row_high
            index = row * (G * GROUP) + head
            q = _load(q_ptr + (row * q_n + head * q_h)[:, None] + dim[None, :], keep, dim, D, WIDTH)
            lse2 = tl.load(lse_ptr + index, mask=keep, other=float("inf")) * _LOG2E
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - lse2[None, :])
            p = tl.where(row[None, :] >= col[:, None], p, 0.0)
            g = tl.zeros((KEYS, ROWS), tl.float32)
            if OUT:
                d_out = _load(d_out_ptr + index[:, None] * D + dim[None, :], keep, dim, D, WIDTH)
                out = _load(out_ptr + index[:, None] * D + dim[None, :], keep, dim, D, WIDTH)
                delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
                g = tl.dot(v, tl.trans(d_out), input_precision="ieee") - delta[None, :]
                d_v = tl.dot(p.to(d_out.dtype), d_out, d_v, input_precision="ieee")
            if SCORES:
                g -= tl.load(dot_ptr + index, mask=keep, other=0.0)[None, :]
            d_k = tl.dot((p * g).to(q.dtype), q, d_k, input_precision="ieee")
    at = (col.to(tl.int64) * G + kv)[:, None] * D + dim[None, :]
    mask = inside[:, None] & (dim < D)[None, :]
    tl.store(d_k_ptr + at, (d_k * scale).to(d_k_ptr.dtype.element_ty), mask=mask)
    tl.store(d_v_ptr + at, d_v.to(d_v_ptr.dtype.element_ty), mask=mask)
