"""Triton kernels of `kernels.tree_attention`: split-KV attention of packed rows, and the merge of the splits.

A tile of ROWS packed rows m = i * GROUP + r has query i under query head r of one KV head, so that K and V
are read once for a group. Keys are divided into tiles of KEYS positions; tiles entirely inside the prefix
need no mask, and the others (the end of the prefix and the new tokens, called ragged here) are masked by
position. Tile t of the keys belongs to split t % splits, so that additional keys do not change the sums of
earlier tiles; entries that a window has passed may be dropped in whole tiles (`_first`), and the others keep
their tiles and splits. Partial results are at index ((b * G + kv) * tiles + tile) * splits + split.

ALONE: a node's result is bit for bit the one of plain decoding, where the tokens that it sees are the last
ones in the cache. Tensor cores round depending on a key's index in the tile, and a tree has its nodes side by
side. So splits with ragged tiles stop before them, and `finish_kernel` continues for each node separately:
the nodes that it sees are gathered, in order, right after the prefix. Sums of weights are accumulated for
each index in a tile, so that they are the same in any layout.

Logits are in base 2 (`scale2` = scale * log2 e); the returned lse is natural. Offsets that may exceed 2^31
are 64-bit. Nothing beyond a sequence's own positions affects a result.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_PREFETCH = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}""")


@triton.jit
def _prefetch(at, SIZE: tl.constexpr):
    """One thread prefetches SIZE numbers from an address on into the L2 cache."""
    size = SIZE * at.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [at, size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _first(first_ptr, b, x, DROPPED: tl.constexpr, PER_HEAD: tl.constexpr):
    """Slot of position 0 of sequence b and its KV head x = b * G + kv; below 0 if positions were dropped."""
    first = 0
    if DROPPED:
        first = -tl.load(first_ptr + b).to(tl.int64)
    if PER_HEAD:
        first = tl.load(first_ptr + x).to(tl.int64)
    return first


@triton.jit
def _rows(tile, T, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Query and group member of each packed row of a tile, and a mask of the existing rows."""
    m = tile * ROWS + tl.arange(0, ROWS)
    return m // GROUP, m % GROUP, m < T * GROUP


@triton.jit
def _step(q, k, v, scale2, top, weights, acc, visible, MASKED: tl.constexpr):
    """A step of the online softmax: new maximum, weights summed by index in the tile, weighted values."""
    logit = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        logit = tl.where(visible, logit, float("-inf"))
    new = tl.maximum(top, tl.max(logit, 1) * scale2)
    base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    p = tl.exp2(logit * scale2 - base[:, None])
    shrink = tl.exp2(top - base)[:, None]
    weights = weights * shrink + p
    acc = tl.dot(p.to(v.dtype), v, acc * shrink, input_precision="ieee")
    return new, weights, acc


@triton.jit
def _store_part(lse_at, out_at, top, weights, acc, exists):
    """Write a split's result. Weights, at most 1 each, are summed as integers: exact in any order."""
    total = tl.sum((weights * 4294967296.0).to(tl.int64), 1).to(tl.float32) / 4294967296.0
    tl.store(lse_at, top + tl.log2(total), mask=exists)
    some = tl.where(total > 0, total, 1.0)
    tl.store(out_at, acc / some[:, None], mask=exists[:, None])


@triton.jit
def _visible(slot, n, query, low_bits, high_bits, N, MASK: tl.constexpr, WORDS: tl.constexpr):
    """Positions of a tile that each row sees. MASK 0: prefix only; 1: causal; 2: the bits of a tree."""
    own = (slot - n)[None, :]
    seen = own < 0
    if MASK == 1:
        seen = own <= query[:, None]
    if MASK == 2:
        # bit `own` of the row's mask, in the first or second 64-bit word; the prefix is visible anyway
        at = tl.maximum(own, 0).to(tl.int64)
        word = low_bits[:, None] >> (at & 63)
        if WORDS == 2:
            word = tl.where(at < 64, word, high_bits[:, None] >> (at & 63))
        seen = seen | ((own < N) & ((word & 1) != 0))
    return seen


@triton.jit
def _in_window(slot, n, query, depth_ptr, T, WINDOW: tl.constexpr, MASK: tl.constexpr):
    """Positions of a tile that are less than WINDOW before each row's token."""
    own = slot - n
    depth = query
    if MASK == 2:
        depth = tl.load(depth_ptr + tl.minimum(query, T - 1)).to(tl.int32)
        inside = (own >= 0) & (own < T)
        own = tl.where(inside, tl.load(depth_ptr + own, mask=inside, other=0).to(tl.int32), own)
    return own[None, :] > (depth - WINDOW)[:, None]


@triton.jit
def _ancestors(own, bits, N):
    """The nodes set in a mask, compacted in order: `source` for each index, and their number."""
    source = tl.zeros_like(own)
    place = 0
    for node in range(N):
        bit = ((bits >> node) & 1).to(tl.int32)
        source = tl.where((own == place) & (bit == 1), node, source)
        place += bit
    return source, place


@triton.jit
def _gathered(
    k_ptr, v_ptr, k_s, v_s, tile, n, bits, N, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile as if the nodes in `bits` followed the prefix, and their mask."""
    dim = tl.arange(0, WIDTH)[None, :]
    own = tile * KEYS + tl.arange(0, KEYS) - n
    source, count = _ancestors(own, bits, N)
    seen = own < count
    if WINDOW:
        seen = seen & (own >= count - WINDOW)  # the node itself is the last of `count`
    at = (n + tl.where(own < 0, own, source)).to(tl.int64)[:, None]
    keep = seen[:, None] & (dim < D)
    k = tl.load(k_ptr + at * k_s + dim, mask=keep, other=0.0)
    v = tl.load(v_ptr + at * v_s + dim, mask=keep, other=0.0)
    return k, v, seen[None, :]


@triton.jit(do_not_specialize=["splits", "T", "N", "base"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, k_tiles, v_tiles, len_ptr, first_ptr, bits_ptr, depth_ptr, out_ptr, lse_ptr,
    state_ptr, scale2, splits, T, N, base, q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, bits_b, bits_t,
    depth_b,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, MASK: tl.constexpr, WORDS: tl.constexpr, BULK: tl.constexpr,
    STAGES: tl.constexpr, CHAINED: tl.constexpr, AHEAD: tl.constexpr, ALONE: tl.constexpr,
    WINDOW: tl.constexpr, DROPPED: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Partial out [ROWS, WIDTH] and base-2 lse [ROWS] of a tile of rows over a split of the keys, in fp32.

    BULK: whole tiles are loaded by the tensor memory accelerator, with the descriptors `k_tiles`, `v_tiles`.
    CHAINED: the GPU may start this kernel while its predecessor ends. The successor may start only after all
        tiles were processed: before that it would take this kernel's multiprocessors. Lengths and the keys of
        the prefix were written before the predecessor, so the first AHEAD tiles of a split are prefetched
        while it runs.
    ALONE: see the module's docstring. N is at most KEYS, so there are one or two ragged tiles; their splits
        leave maximum, weights (in `state_ptr`) and weighted values to `finish_kernel`.
    WINDOW: keys that a token sees, or 0. Tiles before the first token's window are skipped, others masked;
        each keeps its split, so that the sums are those of plain decoding.
    DROPPED: the first `first_ptr` positions of each sequence are not stored; only with a window.
    PER_HEAD: each sequence and KV head has a length of its own, and begins at its slot `first_ptr` of a
        buffer that all share, for which `k_tiles` and `v_tiles` have one sequence and head.
    """
    tiles = tl.cdiv(T * GROUP, ROWS)
    pid, split = tl.program_id(0), tl.program_id(1)
    kv, b = pid // tiles % G, pid // (tiles * G)
    x = pid // tiles
    n = tl.load(len_ptr + (x if PER_HEAD else b)).to(tl.int32) + base
    first = _first(first_ptr, b, x, DROPPED, PER_HEAD)
    end = n + N if MASK else n
    whole, count = n // KEYS, tl.cdiv(end, KEYS)
    masked = tl.maximum(n - WINDOW + 1, 0) // KEYS if WINDOW else whole  # the first tile that needs a mask
    query, member, exists = _rows(pid % tiles, T, GROUP, ROWS)
    if CHAINED:
        if AHEAD > 0:  # noqa: SIM102 (AHEAD is a compile-time constant)
            if not WINDOW and split + (AHEAD - 1) * splits < whole:
                k_at = k_ptr + b.to(tl.int64) * k_b + kv.to(tl.int64) * k_g
                v_at = v_ptr + b.to(tl.int64) * v_b + kv.to(tl.int64) * v_g
                for i in tl.static_range(AHEAD):
                    slot = (first + (split + i * splits) * KEYS).to(tl.int64)
                    _prefetch(k_at + slot * k_s, KEYS * WIDTH)
                    _prefetch(v_at + slot * v_s, KEYS * WIDTH)
        gdc_wait()
    out_at = (pid * splits + split).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot_ptr = lse_ptr + out_at
    if split >= count:
        tl.store(slot_ptr, tl.full((ROWS,), float("-inf"), tl.float32), mask=exists)
        return

    dim, key = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    wide = (dim < D)[None, :]
    k_ptr += b.to(tl.int64) * k_b + kv.to(tl.int64) * k_g + first * k_s
    v_ptr += b.to(tl.int64) * v_b + kv.to(tl.int64) * v_g + first * v_s
    head = kv * GROUP + member
    q_at = b.to(tl.int64) * q_b + head.to(tl.int64) * q_h + query.to(tl.int64) * q_t
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=exists[:, None] & wide, other=0.0)
    q = q.to(k_ptr.dtype.element_ty)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weights = tl.zeros((ROWS, KEYS), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)

    if not WINDOW:
        page, part = b, kv
        if PER_HEAD:
            page, part = b * 0, kv * 0
        for tile in tl.range(split, whole, splits, num_stages=STAGES):
            if BULK:
                row = (first + tile * KEYS).to(tl.int32)
                k = tl.reshape(k_tiles.load([page, part, row, 0]), (KEYS, WIDTH))
                v = tl.reshape(v_tiles.load([page, part, row, 0]), (KEYS, WIDTH))
            else:
                slot = (tile * KEYS + key).to(tl.int64)
                k_at, v_at = (
                    k_ptr + (slot * k_s)[:, None] + dim[None, :],
                    v_ptr + (slot * v_s)[:, None] + dim[None, :],
                )
                if D == WIDTH:
                    k, v = tl.load(k_at), tl.load(v_at)
                else:
                    k, v = tl.load(k_at, mask=wide, other=0.0), tl.load(v_at, mask=wide, other=0.0)
            top, weights, acc = _step(q, k, v, scale2, top, weights, acc, True, False)

    late = (split + splits - whole % splits) % splits
    if (not ALONE) or WINDOW:
        begin, stop = masked + (split + splits - masked % splits) % splits, whole if ALONE else count
        if begin < stop:
            low_bits, high_bits = query.to(tl.int64), query.to(tl.int64)
            if MASK == 2:
                bits_at = bits_ptr + b.to(tl.int64) * bits_b + query.to(tl.int64) * bits_t
                low_bits = tl.load(bits_at, mask=exists, other=0)
                if WORDS == 2:
                    high_bits = tl.load(bits_at + 1, mask=exists, other=0)
            for tile in tl.range(begin, stop, splits, num_stages=1):
                slot = tile * KEYS + key
                keep = (slot < end)[:, None] & wide
                far = slot.to(tl.int64)[:, None]
                k = tl.load(k_ptr + far * k_s + dim[None, :], mask=keep, other=0.0)
                v = tl.load(v_ptr + far * v_s + dim[None, :], mask=keep, other=0.0)
                seen = _visible(slot, n, query, low_bits, high_bits, N, MASK, WORDS) & (slot < end)[None, :]
                if WINDOW:
                    seen = seen & _in_window(slot, n, query, depth_ptr + b * depth_b, T, WINDOW, MASK)
                top, weights, acc = _step(q, k, v, scale2, top, weights, acc, seen, True)

    if CHAINED:
        gdc_launch_dependents()
    part_at = out_ptr + out_at[:, None] * WIDTH + dim[None, :]
    if ALONE:  # noqa: SIM102 (ALONE is a compile-time constant)
        if late < count - whole:
            state_at = (pid * 2 + late).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            tl.store(state_ptr + state_at[:, None] * KEYS + key[None, :], weights, mask=exists[:, None])
            tl.store(slot_ptr, top, mask=exists)
            tl.store(part_at, acc, mask=exists[:, None])
            return
    _store_part(slot_ptr, part_at, top, weights, acc, exists)


@triton.jit(do_not_specialize=["splits", "T", "base"])
def finish_kernel(
    q_ptr, k_ptr, v_ptr, len_ptr, first_ptr, bits_ptr, out_ptr, lse_ptr, state_ptr, scale2, splits, T, base,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, bits_b, bits_t,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, OWN: tl.constexpr, CHAINED: tl.constexpr, WINDOW: tl.constexpr,
    DROPPED: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Process the ragged tile that an ALONE split has left out, for one node.

    Two programs for each node of each KV head, one for each tile that may be ragged; a tile of OWN rows has a
    node's query heads. Queries and keys were written before the preceding kernel.
    """
    if CHAINED:
        gdc_launch_dependents()
    late, turn = tl.program_id(0) % 2, tl.program_id(0) // 2
    node, kv, x, b = turn % T, turn // T % G, turn // T, turn // (T * G)
    n = tl.load(len_ptr + (x if PER_HEAD else b)).to(tl.int32) + base
    whole, count = n // KEYS, tl.cdiv(n + T, KEYS)
    if (whole + late >= count) | (late >= splits):
        return
    bits = tl.load(bits_ptr + b.to(tl.int64) * bits_b + node.to(tl.int64) * bits_t)
    row, dim, key = tl.arange(0, OWN), tl.arange(0, WIDTH), tl.arange(0, KEYS)
    exists = row < GROUP
    head = kv * GROUP + row
    q_at = b.to(tl.int64) * q_b + head.to(tl.int64) * q_h + node.to(tl.int64) * q_t
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=exists[:, None] & (dim < D)[None, :], other=0.0)
    q = q.to(k_ptr.dtype.element_ty)
    first = _first(first_ptr, b, x, DROPPED, PER_HEAD)
    k_ptr += b.to(tl.int64) * k_b + kv.to(tl.int64) * k_g + first * k_s
    v_ptr += b.to(tl.int64) * v_b + kv.to(tl.int64) * v_g + first * v_s
    k, v, seen = _gathered(k_ptr, v_ptr, k_s, v_s, whole + late, n, bits, T, D, WIDTH, KEYS, WINDOW)
    if CHAINED:
        gdc_wait()

    m = node * GROUP + row
    pid = x * tl.cdiv(T * GROUP, ROWS) + m // ROWS
    state_at = (pid * 2 + late).to(tl.int64) * ROWS + m % ROWS
    weights = tl.load(state_ptr + state_at[:, None] * KEYS + key[None, :], mask=exists[:, None], other=0.0)
    out_at = (pid * splits + (whole + late) % splits).to(tl.int64) * ROWS + m % ROWS
    part_at = out_ptr + out_at[:, None] * WIDTH + dim[None, :]
    top = tl.load(lse_ptr + out_at, mask=exists, other=float("-inf"))
    acc = tl.load(part_at, mask=exists[:, None], other=0.0)
    top, weights, acc = _step(q, k, v, scale2, top, weights, acc, seen, True)
    for tile in tl.range(whole + late + splits, count, splits, num_stages=1):  # only where there is one split
        k, v, seen = _gathered(k_ptr, v_ptr, k_s, v_s, tile, n, bits, T, D, WIDTH, KEYS, WINDOW)
        top, weights, acc = _step(q, k, v, scale2, top, weights, acc, seen, True)
    _store_part(lse_ptr + out_at, part_at, top, weights, acc, exists)


@triton.jit(do_not_specialize=["see_b", "see_t", "T", "N"])
def bits_kernel(visible_ptr, bits_ptr, see_b, see_t, see_n, T, N, ROWS: tl.constexpr, CHAINED: tl.constexpr):
    """One word of the masks of ROWS nodes of one tree: bit j is set if the node sees node j of the word."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b, word = tl.program_id(0).to(tl.int64), tl.program_id(2)
    row, bit = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, 64)
    inside = (row < T)[:, None] & (word * 64 + bit < N)[None, :]
    seen = visible_ptr + b * see_b + row[:, None] * see_t + (word * 64 + bit)[None, :] * see_n
    sees = tl.load(seen, mask=inside, other=0).to(tl.int64) << bit.to(tl.int64)[None, :]
    tl.store(bits_ptr + (b * T + row) * tl.num_programs(2) + word, tl.sum(sees, 1), mask=row < T)
