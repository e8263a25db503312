"""Triton kernels of `kernels.importance`: one pass over K (and V), work divided by the tables of `spans`.

A tile of M = HEADS * ROWS packed rows has HEADS query heads of one KV head and ROWS queries, head by head, so
that few queries still fill a tile and K is read once for them. A program's number is item * PARTS + part,
where a part is one such set of heads. Partial results are at index program number * M + m; the kernels named
`merge_...` combine them. Logits are in base 2 (`scale2` = scale * log2 e); the returned lse is natural.

Address arithmetic that may exceed 2^31 is 64-bit. Nothing beyond an item's keys is read.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _heads(part, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """KV head of a part, and of each packed row the query head, the query in the block, and if it exists."""
    sets: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    m = tl.arange(0, HEADS * ROWS)
    kv = part // sets
    local = (part % sets) * HEADS + m // ROWS
    return kv.to(tl.int64), kv * GROUP + local, m % ROWS, local < GROUP


@triton.jit
def _load(pointers, keep, dim, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load the vectors of `keep`, with zeros for the others and for the columns from D on."""
    mask = keep[:, None]
    if D != WIDTH:
        mask = mask & (dim < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _online(logit, top, total):
    """A step of the online softmax: weights, new maximum, new sum, and the factor of the older sums."""
    new = tl.maximum(top, tl.max(logit, 1))
    shrink = tl.exp2(top - new)
    p = tl.exp2(logit - new[:, None])
    return p, new, total * shrink + tl.sum(p, 1), shrink


@triton.jit
def attend_kernel(
    q_ptr, own_k_ptr, own_v_ptr, k_ptr, v_ptr, items_ptr, lse_ptr, out_ptr, scale2,
    q_n, q_h, ok_n, ok_g, ov_n, ov_g, k_b, k_t, k_g, v_b, v_t, v_g,
    PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Partial lse of a block of queries over an item's keys; with VALUES also the output, [M, WIDTH]."""
    pid = tl.program_id(0).to(tl.int64)
    item = items_ptr + pid // PARTS * 8
    kv, head, row, exists = _heads((pid % PARTS).to(tl.int32), GROUP, HEADS, ROWS)
    row += tl.load(item)
    keep = exists & (row < tl.load(item + 1))
    seq = tl.load(item + 2).to(tl.int64)
    low, high = tl.load(item + 3), tl.load(item + 4)
    own_low, own_high = tl.load(item + 5), tl.load(item + 6)
    dim, n = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    q = _load(
        q_ptr + (row.to(tl.int64) * q_n + head.to(tl.int64) * q_h)[:, None] + dim[None, :],
        keep,
        dim,
        D,
        WIDTH,
    )
    top = tl.full((HEADS * ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS * ROWS,), tl.float32)
    acc = tl.zeros((HEADS * ROWS, WIDTH), tl.float32)

    k_at = k_ptr + seq * k_b + kv * k_g + (low + n).to(tl.int64)[:, None] * k_t + dim[None, :]
    v_at = v_ptr + seq * v_b + kv * v_g + (low + n).to(tl.int64)[:, None] * v_t + dim[None, :]
    for start in range(low, high, KEYS):
        inside = n < high - start
        k = _load(k_at, inside, dim, D, WIDTH)
        logit = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        logit = tl.where(inside[None, :], logit, float("-inf"))
        p, top, total, shrink = _online(logit, top, total)
        if VALUES:
            v = _load(v_at, inside, dim, D, WIDTH)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            v_at += KEYS * v_t
        k_at += KEYS * k_t

    k_at = own_k_ptr + kv * ok_g + (own_low + n).to(tl.int64)[:, None] * ok_n + dim[None, :]
    v_at = own_v_ptr + kv * ov_g + (own_low + n).to(tl.int64)[:, None] * ov_n + dim[None, :]
    for start in tl.range(own_low, own_high, KEYS, num_stages=1):
        k = _load(k_at, n < own_high - start, dim, D, WIDTH)
        logit = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        logit = tl.where((start + n)[None, :] <= row[:, None], logit, float("-inf"))
        p, top, total, shrink = _online(logit, top, total)
        if VALUES:
            v = _load(v_at, n < own_high - start, dim, D, WIDTH)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            v_at += KEYS * ov_n
        k_at += KEYS * ok_n

    slot = pid * (HEADS * ROWS) + tl.arange(0, HEADS * ROWS)
    tl.store(lse_ptr + slot, top + tl.log2(total))
    if VALUES:
        tl.store(out_ptr + slot[:, None] * WIDTH + dim[None, :], acc / total[:, None])


@triton.jit
def merge_lse_kernel(
    part_ptr, blocks_ptr, lse_ptr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """lse_NH of a block of queries and a part, from the partial ones of its items."""
    pid = tl.program_id(0).to(tl.int64)
    block, part = blocks_ptr + pid // PARTS * 4, (pid % PARTS).to(tl.int32)
    _, head, row, exists = _heads(part, GROUP, HEADS, ROWS)
    row += tl.load(block)
    keep = exists & (row < tl.load(block + 1))
    first, count = tl.load(block + 2).to(tl.int64), tl.load(block + 3)
    m, split = tl.arange(0, HEADS * ROWS), tl.arange(0, SPLITS)
    at = part_ptr + ((first + split) * PARTS + part)[:, None] * (HEADS * ROWS) + m[None, :]
    top = tl.full((HEADS * ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS * ROWS,), tl.float32)
    for start in range(0, count, SPLITS):
        lse = tl.load(at, mask=(split < count - start)[:, None], other=float("-inf"))
        new = tl.maximum(top, tl.max(lse, 0))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(lse - new[None, :]), 0)
        top = new
        at += SPLITS * PARTS * (HEADS * ROWS)
    sets: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    H: tl.constexpr = PARTS // sets * GROUP
    tl.store(lse_ptr + row.to(tl.int64) * H + head, (top + tl.log2(total)) * _LN2, mask=keep)


@triton.jit
def _rows_of(
    blocks_ptr, PARTS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Packed rows of a merging program: index n * H + h, mask, slots [SPLITS, CHUNK], number of splits."""
    M: tl.constexpr = HEADS * ROWS
    chunks: tl.constexpr = M // CHUNK
    sets: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    H: tl.constexpr = PARTS // sets * GROUP
    pid = tl.program_id(0).to(tl.int64)
    m = (pid % chunks).to(tl.int32) * CHUNK + tl.arange(0, CHUNK)
    part = (pid // chunks % PARTS).to(tl.int32)
    block = blocks_ptr + pid // (chunks * PARTS) * 4
    local = part % sets * HEADS + m // ROWS
    row = tl.load(block) + m % ROWS
    index = row.to(tl.int64) * H + part // sets * GROUP + local
    first = tl.load(block + 2).to(tl.int64) + tl.arange(0, SPLITS)
    slot = (first * PARTS + part)[:, None] * M + m[None, :]
    return index, (local < GROUP) & (row < tl.load(block + 1)), slot, tl.load(block + 3)


@triton.jit
def merge_out_kernel(
    part_lse_ptr, part_out_ptr, blocks_ptr, lse_ptr, out_ptr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """lse_NH and out_NHD of CHUNK packed rows, from the partial ones of their items."""
    index, keep, slot, count = _rows_of(blocks_ptr, PARTS, GROUP, HEADS, ROWS, CHUNK, SPLITS)
    dim, split = tl.arange(0, WIDTH), tl.arange(0, SPLITS)
    top = tl.full((CHUNK,), float("-inf"), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    acc = tl.zeros((CHUNK, WIDTH), tl.float32)
    for start in range(0, count, SPLITS):
        inside = (split < count - start)[:, None]
        lse = tl.load(part_lse_ptr + slot, mask=inside, other=float("-inf"))
        at = slot[:, :, None] * WIDTH + dim[None, None, :]
        out = tl.load(part_out_ptr + at, mask=inside[:, :, None], other=0.0)
        new = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new[None, :])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * out, 0)
        top = new
        slot += SPLITS * PARTS * HEADS * ROWS
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + index[:, None] * D + dim[None, :], out, mask=keep[:, None] & (dim < D)[None, :])
    tl.store(lse_ptr + index, (top + tl.log2(total)) * _LN2, mask=keep)


@triton.jit
def _columns(k, q, lse2, scale2, row, col, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
             OWN: tl.constexpr, MAX: tl.constexpr):  # fmt: skip
    """Sum or maximum over a block's queries of p for each key and head: [KEYS, HEADS].

    Keys are along the tile's rows, so that the reduction stays within a warp.
    """
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - lse2[None, :])
    if OWN:
        p = tl.where(row[None, :] >= col[:, None], p, 0.0)
    p = tl.reshape(p, (KEYS, HEADS, ROWS))
    return tl.max(p, 2) if MAX else tl.sum(p, 2)


@triton.jit(do_not_specialize=["s_b", "s_h"])
def column_kernel(
    q_ptr, lse_ptr, k_ptr, items_ptr, s_ptr, scale2,
    q_n, q_h, k_b, k_t, k_g, s_b, s_h, s_t,
    PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ONE: tl.constexpr, OWN: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """Column means or maxima over an item's keys: every key is written once, by the only program that has it.

    ONE: all queries are one block, which stays in registers while the program loops over the keys; otherwise
    the item is one block of keys, which stays while it loops over the queries. OWN: keys belong to the
    queries, and are visible from their own query on.
    """
    pid = tl.program_id(0).to(tl.int64)
    item = items_ptr + pid // PARTS * 6
    kv, head, in_block, exists = _heads((pid % PARTS).to(tl.int32), GROUP, HEADS, ROWS)
    seq = tl.load(item).to(tl.int64)
    low, high = tl.load(item + 1), tl.load(item + 2)
    row_low, row_high = tl.load(item + 3), tl.load(item + 4)
    share = 1.0 if MAX else 1.0 / tl.load(item + 5).to(tl.float32)
    sets: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    H: tl.constexpr = PARTS // sets * GROUP
    dim, n = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    local = (pid % sets).to(tl.int32) * HEADS + tl.arange(0, HEADS)
    row = row_low + in_block
    q_at = q_ptr + (row.to(tl.int64) * q_n + head.to(tl.int64) * q_h)[:, None] + dim[None, :]
    lse_at = lse_ptr + row.to(tl.int64) * H + head
    k_at = k_ptr + seq * k_b + kv * k_g + (low + n).to(tl.int64)[:, None] * k_t + dim[None, :]
    s_at = s_ptr + seq * s_b + (kv * GROUP + local)[None, :] * s_h + (low + n).to(tl.int64)[:, None] * s_t
    there = (local < GROUP)[None, :]
    if ONE:
        keep = exists & (row < row_high)
        q = _load(q_at, keep, dim, D, WIDTH)
        lse2 = tl.load(lse_at, mask=keep, other=float("inf")) * _LOG2E
        for start in range(low, high, KEYS):
            inside = n < high - start
            k = _load(k_at, inside, dim, D, WIDTH)
            s = _columns(k, q, lse2, scale2, row, start + n, HEADS, ROWS, KEYS, OWN, MAX)
            tl.store(s_at, s * share, mask=inside[:, None] & there)
            k_at += KEYS * k_t
            s_at += KEYS * s_t
    else:
        inside = n < high - low
        k = _load(k_at, inside, dim, D, WIDTH)
        s = tl.zeros((KEYS, HEADS), tl.float32)
        for start in range(row_low, row_high, ROWS):
            row = start + in_block
            keep = exists & (row < row_high)
            q = _load(q_at, keep, dim, D, WIDTH)
            lse2 = tl.load(lse_at, mask=keep, other=float("inf")) * _LOG2E
            new = _columns(k, q, lse2, scale2, row, low + n, HEADS, ROWS, KEYS, OWN, MAX)
            s = tl.maximum(s, new) if MAX else s + new
            q_at += ROWS * q_n
            lse_at += ROWS * H
        tl.store(s_at, s * share, mask=inside[:, None] & there)
