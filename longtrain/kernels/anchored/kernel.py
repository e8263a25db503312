"""The Triton kernels of `kernels.anchored`.

Rows of all blocks lie end to end, X = R * GROUP of a block: row p of a KV head belongs to block p // X, and
is query head p % GROUP of the block's row p // GROUP. A program has a tile of such rows, which may end within
a block, or a tile of keys; it loops over the keys (rows) that any of its rows (keys) sees. Those that all see
need no mask. Bounds ascend with the blocks, so both are ranges; other keys lie before and behind (`_cut`).

The blocks' own keys lie end to end likewise, R of a block. Logits are in base 2 (`scale2` = scale * log2 e),
and so is the lse. Address arithmetic that may exceed 2^31 is 64-bit. No sum is atomic.

Shapes: as in `kernels.anchored`; g is a KV head, ROWS rows and KEYS keys of a tile.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

_NOTHING = tl.constexpr(-1e30)
"""The maximum of no logits: finite, so that a row without keys in a tile keeps its sums."""


@triton.jit
def _at(ptr, start, n, dim, GROUP: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr):
    """Addresses of rows start + n, where each GROUP rows lie side by side, STEP numbers behind the last."""
    local = start % GROUP + n
    ptr += (start // GROUP).to(tl.int64) * STEP
    return ptr + ((local // GROUP) * STEP + (local % GROUP) * D)[:, None] + dim[None, :]


@triton.jit
def _load(
    ptr, start, n, inside, dim,
    MASKED: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load rows start + n (`_at`); zeros for those not inside, if MASKED, and for columns from D on."""
    at = _at(ptr, start, n, dim, GROUP, STEP, D)
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (dim < D)[None, :], other=0.0)
    if D != WIDTH:
        return tl.load(at, mask=(dim < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _store(at, value, inside, dim, D: tl.constexpr):
    tl.store(at, value.to(at.dtype.element_ty), mask=inside[:, None] & (dim < D)[None, :])


@triton.jit
def _cut(low, all_low, all_high, high, SIZE: tl.constexpr):
    """Tiles of low..high: the first without a mask, how many, where they end; masked ones before, and in all.

    `all_low..all_high` is what needs no mask; it may be empty or reversed.
    """
    whole = tl.maximum(all_high - all_low, 0) // SIZE
    begin = tl.where(whole > 0, all_low, low)
    end = begin + whole * SIZE
    before = (begin - low + SIZE - 1) // SIZE
    return begin, whole, end, before, before + (high - end + SIZE - 1) // SIZE


@triton.jit
def _masked_tile(i, low, begin, end, high, before, SIZE: tl.constexpr):
    """Start of the i-th masked tile of `_cut`, and where it must stop."""
    early = i < before
    return tl.where(early, low + i * SIZE, end + (i - before) * SIZE), tl.where(early, begin, high)


@triton.jit
def _rows_of(n, rows, X: tl.constexpr, ROWS: tl.constexpr):
    """Return a program's first row, each row's block, the first and the last block; late rows come first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    block = tl.minimum(first + n, rows - 1) // X
    return first, block, first // X, (tl.minimum(first + ROWS, rows) - 1) // X


@triton.jit
def _attend(q, k, v, seen, top, total, out, scale2, MASKED: tl.constexpr):
    """A step of the online softmax over a tile of keys: the new maximum, sum of weights and of values."""
    logit = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        logit = tl.where(seen, logit, float("-inf"))
    new = tl.maximum(top, tl.max(logit, 1) * scale2)
    p = tl.exp2(logit * scale2 - new[:, None])
    less = tl.exp2(top - new)
    out = tl.dot(p.to(v.dtype), v, out * less[:, None], input_precision="ieee")
    return new, total * less + tl.sum(p, 1), out


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["low_ptr", "high_ptr"])
def forward_kernel(
    q_ptr, own_k_ptr, own_v_ptr, k_ptr, v_ptr, low_ptr, high_ptr, out_ptr, lse_ptr, scale2, rows,
    G: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output and lse of a tile of rows; `rows` are all of a KV head."""
    X: tl.constexpr = R * GROUP
    STEP: tl.constexpr = G * D
    g = tl.program_id(1)
    n, key, dim = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDTH)
    first, block, one, last = _rows_of(n, rows, X, ROWS)
    there = first + n < rows
    q = _load(q_ptr + g * GROUP * D, first, n, there, dim, True, GROUP, STEP * GROUP, D, WIDTH)
    top = tl.full((ROWS,), _NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in tl.range(0, tl.cdiv((last + 1 - one) * R, KEYS), num_stages=1):
        start = one * R + i * KEYS
        c = start + key
        inside = c < (last + 1) * R
        k = _load(own_k_ptr + g * D, start, key, inside, dim, True, 1, STEP, D, WIDTH)
        v = _load(own_v_ptr + g * D, start, key, inside, dim, True, 1, STEP, D, WIDTH)
        seen = (c // R)[None, :] == block[:, None]
        top, total, out = _attend(q, k, v, seen, top, total, out, scale2, True)
    low, all_low = tl.load(low_ptr + one), tl.load(low_ptr + last)
    all_high, high = tl.load(high_ptr + one), tl.load(high_ptr + last)
    begin, whole, end, before, masked = _cut(low, all_low, all_high, high, KEYS)
    low_row, high_row = tl.load(low_ptr + block), tl.load(high_ptr + block)
    for i in tl.range(0, masked, num_stages=1):
        start, stop = _masked_tile(i, low, begin, end, high, before, KEYS)
        c = start + key
        k = _load(k_ptr + g * D, start, key, c < stop, dim, True, 1, STEP, D, WIDTH)
        v = _load(v_ptr + g * D, start, key, c < stop, dim, True, 1, STEP, D, WIDTH)
        seen = (c < stop)[None, :] & (c[None, :] >= low_row[:, None]) & (c[None, :] < high_row[:, None])
        top, total, out = _attend(q, k, v, seen, top, total, out, scale2, True)
    for i in range(whole):
        start = begin + i * KEYS
        k = _load(k_ptr + g * D, start, key, there, dim, False, 1, STEP, D, WIDTH)
        v = _load(v_ptr + g * D, start, key, there, dim, False, 1, STEP, D, WIDTH)
        top, total, out = _attend(q, k, v, there, top, total, out, scale2, False)
    at = _at(out_ptr + g * GROUP * D, first, n, dim, GROUP, STEP * GROUP, D)
    _store(at, out / total[:, None], there, dim, D)
    tl.store(lse_ptr + g.to(tl.int64) * rows + first + n, top + tl.log2(total), mask=there)


@triton.jit
def _slope(q, grad, k, v, seen, lse, delta, dq, scale2, MASKED: tl.constexpr):
    """Add a tile of keys to the gradient of the queries, without the factor `scale`."""
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    ds = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["low_ptr", "high_ptr"])
def queries_kernel(
    grad_ptr, q_ptr, out_ptr, lse_ptr, own_k_ptr, own_v_ptr, k_ptr, v_ptr, low_ptr, high_ptr,
    dq_ptr, delta_ptr, scale, scale2, rows,
    G: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries, and delta = rowsum(dO * O); the loops are those of `forward_kernel`."""
    X: tl.constexpr = R * GROUP
    STEP: tl.constexpr = G * D
    g = tl.program_id(1)
    n, key, dim = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDTH)
    first, block, one, last = _rows_of(n, rows, X, ROWS)
    there = first + n < rows
    head = g * GROUP * D
    grad = _load(grad_ptr + head, first, n, there, dim, True, GROUP, STEP * GROUP, D, WIDTH)
    out = _load(out_ptr + head, first, n, there, dim, True, GROUP, STEP * GROUP, D, WIDTH)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    row = g.to(tl.int64) * rows + first + n
    tl.store(delta_ptr + row, delta, mask=there)
    q = _load(q_ptr + head, first, n, there, dim, True, GROUP, STEP * GROUP, D, WIDTH)
    lse = tl.load(lse_ptr + row, mask=there, other=float("inf"))
    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in tl.range(0, tl.cdiv((last + 1 - one) * R, KEYS), num_stages=1):
        start = one * R + i * KEYS
        c = start + key
        inside = c < (last + 1) * R
        k = _load(own_k_ptr + g * D, start, key, inside, dim, True, 1, STEP, D, WIDTH)
        v = _load(own_v_ptr + g * D, start, key, inside, dim, True, 1, STEP, D, WIDTH)
        seen = (c // R)[None, :] == block[:, None]
        dq = _slope(q, grad, k, v, seen, lse, delta, dq, scale2, True)
    low, all_low = tl.load(low_ptr + one), tl.load(low_ptr + last)
    all_high, high = tl.load(high_ptr + one), tl.load(high_ptr + last)
    begin, whole, end, before, masked = _cut(low, all_low, all_high, high, KEYS)
    low_row, high_row = tl.load(low_ptr + block), tl.load(high_ptr + block)
    for i in tl.range(0, masked, num_stages=1):
        start, stop = _masked_tile(i, low, begin, end, high, before, KEYS)
        c = start + key
        k = _load(k_ptr + g * D, start, key, c < stop, dim, True, 1, STEP, D, WIDTH)
        v = _load(v_ptr + g * D, start, key, c < stop, dim, True, 1, STEP, D, WIDTH)
        seen = (c < stop)[None, :] & (c[None, :] >= low_row[:, None]) & (c[None, :] < high_row[:, None])
        dq = _slope(q, grad, k, v, seen, lse, delta, dq, scale2, True)
    for i in range(whole):
        start = begin + i * KEYS
        k = _load(k_ptr + g * D, start, key, there, dim, False, 1, STEP, D, WIDTH)
        v = _load(v_ptr + g * D, start, key, there, dim, False, 1, STEP, D, WIDTH)
        dq = _slope(q, grad, k, v, there, lse, delta, dq, scale2, False)
    _store(_at(dq_ptr + head, first, n, dim, GROUP, STEP * GROUP, D), dq * scale, there, dim, D)


@triton.jit
def _both(k, v, q, grad, lse, delta, seen, dk, dv, scale2, MASKED: tl.constexpr):
    """Add a tile of rows to the gradients of keys and values; keys lie along the tile's rows."""
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - lse[None, :])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
    ds = p * (tl.dot(v, tl.trans(grad), input_precision="ieee") - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit(
    do_not_specialize=["rows", "keys"],
    do_not_specialize_on_alignment=["low_ptr", "high_ptr", "ranges_ptr"],
)
def keys_kernel(
    grad_ptr, q_ptr, lse_ptr, delta_ptr, k_ptr, v_ptr, low_ptr, high_ptr, ranges_ptr, dk_ptr, dv_ptr,
    scale, scale2, rows, keys,
    G: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of `keys`, over the query heads of a KV head. OWN: they are the blocks' own.

    `ranges` has for each tile of shared keys the first and last block that sees one of them, and between the
    first and last that see all; lasts are exclusive.
    """
    X: tl.constexpr = R * GROUP
    STEP: tl.constexpr = G * D
    g, tile = tl.program_id(1), tl.program_id(0)
    first = tile * KEYS
    n, key, dim = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDTH)
    c = first + key
    inside = c < keys
    k = _load(k_ptr + g * D, first, key, inside, dim, True, 1, STEP, D, WIDTH)
    v = _load(v_ptr + g * D, first, key, inside, dim, True, 1, STEP, D, WIDTH)
    if OWN:
        one, last = first // R, (tl.minimum(first + KEYS, keys) - 1) // R + 1
        all_one = tl.where(last - one > 1, last, one)
        all_last = last
    else:
        one, all_one = tl.load(ranges_ptr + tile * 4), tl.load(ranges_ptr + tile * 4 + 1)
        all_last, last = tl.load(ranges_ptr + tile * 4 + 2), tl.load(ranges_ptr + tile * 4 + 3)
    low, high = one * X, last * X
    begin, whole, end, before, masked = _cut(low, all_one * X, all_last * X, high, ROWS)
    head = g * GROUP * D
    lse_ptr += g.to(tl.int64) * rows
    delta_ptr += g.to(tl.int64) * rows
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    for i in tl.range(0, masked, num_stages=1):
        start, stop = _masked_tile(i, low, begin, end, high, before, ROWS)
        p = start + n
        q = _load(q_ptr + head, start, n, p < stop, dim, True, GROUP, STEP * GROUP, D, WIDTH)
        grad = _load(grad_ptr + head, start, n, p < stop, dim, True, GROUP, STEP * GROUP, D, WIDTH)
        lse = tl.load(lse_ptr + p, mask=p < stop, other=float("inf"))
        delta = tl.load(delta_ptr + p, mask=p < stop, other=0.0)
        block = tl.minimum(p, rows - 1) // X
        if OWN:
            seen = (c // R)[:, None] == block[None, :]
        else:
            seen = c[:, None] >= tl.load(low_ptr + block)[None, :]
            seen = seen & (c[:, None] < tl.load(high_ptr + block)[None, :])
        dk, dv = _both(k, v, q, grad, lse, delta, seen, dk, dv, scale2, True)
    for i in range(whole):
        start = begin + i * ROWS
        q = _load(q_ptr + head, start, n, inside, dim, False, GROUP, STEP * GROUP, D, WIDTH)
        grad = _load(grad_ptr + head, start, n, inside, dim, False, GROUP, STEP * GROUP, D, WIDTH)
        lse, delta = tl.load(lse_ptr + start + n), tl.load(delta_ptr + start + n)
        dk, dv = _both(k, v, q, grad, lse, delta, inside, dk, dv, scale2, False)
    _store(_at(dk_ptr + g * D, first, key, dim, 1, STEP, D), dk * scale, inside, dim, D)
    _store(_at(dv_ptr + g * D, first, key, dim, 1, STEP, D), dv, inside, dim, D)
