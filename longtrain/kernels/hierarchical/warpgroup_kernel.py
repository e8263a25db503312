"""Gluon kernel of hierarchical attention at 8 bits, for up to 32 packed rows and heads of 128: a warp group.

The formulas are those of `attention_kernel`. Here codes are the left operand of the products of a warp group
(`wgmma`, compute capability 9.0), which is read from registers: a code is unpacked once, by the thread that
needs it, for all rows (`warpgroup_operands`). Queries times steps, and weights, are the right operand and go
through shared memory. So the lines of scores are tokens, those of sums are dimensions, and the columns of
both are packed rows. A block takes two barriers: one when scores are known, and one when weights are.

A row's base (`fragments_rows.LIFT`) stays until a weight would leave what fp16 holds. In most blocks warps
only ask each other whether there is such a weight; a row's maximum is told to all in the few others.

A block is asked for as soon as its slot is free, its values a block later than its keys. A load waits behind
all that the other programs have asked for; so the first block's keys are asked for before the kernel in front
has ended, queries right after its end, and all other blocks after these. Queries times steps are rounded to
fp16 (2^-12 of each), as in `attention_kernel`; `fragments_kernel` takes most of that error back. Packed rows
are numbered as in `tree_attention.kernel`. Nothing of a row's result depends on other rows, nor on ROWS,
which is 16 or 32.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.hierarchical.fragments_rows import LIFT, LOG2, SLACK
from longtrain.kernels.hierarchical.warpgroup_operands import (
    LINE,
    MOST_BLOCKS,
    ONE_EACH,
    OPERAND,
    PLAIN,
    QUERIES,
    TURNED,
    WARPS,
    as_table,
    ask,
    ask_numbers,
    by_steps,
    channels,
    dimensions,
    halves_of,
    key_steps_of,
    keys_of,
    load_async,
    numbers_of,
    values_of,
    zeros_of,
    zeros_operand,
)

_RING = gl.constexpr(384)
_UNIT = gl.constexpr(2.0**20)
"""What a sum is multiplied by: a code of 1 is 2^-24 in a product, and a sixteenth of its step."""


@gluon.jit
def _times_q(x, q_smem, ROWS: gl.constexpr, ACC: gl.constexpr):
    """Sums [MOST_BLOCKS, ROWS] over channels, of the blocks' zeros (or steps) times the queries."""
    none = gl.zeros([MOST_BLOCKS, ROWS], gl.float32, ACC)
    return warpgroup_mma(zeros_operand(x, ACC), q_smem.permute((1, 0)), none)


@gluon.jit
def _of_column(x, like):
    """A number of each column, in all lines of a tensor."""
    LIKE: gl.constexpr = like.type.layout
    return gl.broadcast(gl.convert_layout(x, gl.SliceLayout(0, LIKE))[None, :], like)[0]


@gluon.jit
def _of_line(x, like):
    """A number of each line, in all columns of a tensor."""
    LIKE: gl.constexpr = like.type.layout
    return gl.broadcast(gl.convert_layout(x, gl.SliceLayout(1, LIKE))[:, None], like)[0]


@gluon.jit
def _sum_of_thread(x, ROWS: gl.constexpr):
    """Sums of the four lines of a thread, [32, ROWS]."""
    return gl.reshape(gl.sum(gl.sum(gl.reshape(x, [2, 4, 2, 8, ROWS]), 2), 0), [32, ROWS])


@gluon.jit
def _lines(x, ROWS: gl.constexpr):
    """The four lines of a thread, each [32, ROWS]."""
    x = gl.permute(gl.reshape(x, [2, 4, 2, 8, ROWS]), [1, 3, 4, 0, 2])
    first, second = gl.split(gl.reshape(x, [32, ROWS, 2, 2]))
    return gl.split(first) + gl.split(second)


@gluon.jit
def _plus_products(sums, x, y, ROWS: gl.constexpr):
    """Sums of the products of the four lines of a thread, added to what there is: one rounding each."""
    x, y = _lines(x, ROWS), _lines(y, ROWS)
    for i in gl.static_range(4):
        sums = gl.fma(x[i], y[i], sums)
    return sums


@gluon.jit
def _most_of_thread(x, ROWS: gl.constexpr):
    """Largest numbers of the four lines of a thread, [32, ROWS]."""
    return gl.reshape(gl.max(gl.max(gl.reshape(x, [2, 4, 2, 8, ROWS]), 2), 0), [32, ROWS])


@gluon.jit
def _column_sum(x, smem, ROWS: gl.constexpr, ACROSS: gl.constexpr, COLUMN: gl.constexpr):
    """Sums over all lines of the sums of threads [32, ROWS]."""
    smem.store(gl.sum(gl.reshape(x, [4, 8, ROWS]), 1))
    return gl.convert_layout(gl.sum(smem.load(ACROSS), 0), COLUMN)


@gluon.jit
def _finish(out_ptr, lse_ptr, out, lse, dim, rows, splits, ROWS: gl.constexpr, COLUMN: gl.constexpr):
    """Store a program's part."""
    slot = (gl.program_id(0) * splits + gl.program_id(1)).to(gl.int64)
    column = gl.arange(0, ROWS, COLUMN)
    at = column[None, :] * 128 + dim[:, None]
    gl.store(out_ptr + slot * (ROWS * 128) + at, out, mask=(column < rows)[None, :])
    gl.store(lse_ptr + slot * ROWS + column, lse, mask=column < rows)


@gluon.jit(do_not_specialize=["splits", "T", "BLOCKS"])
def attend_kernel(
    q_ptr, k_upper_ptr, k_lower_ptr, v_upper_ptr, v_lower_ptr, k_step_ptr, k_zero_ptr, v_step_ptr, v_zero_ptr,
    ring_k_ptr, ring_v_ptr, len_ptr, blocks_ptr, bits_ptr, out_ptr, lse_ptr, scale2, splits, T, BLOCKS,
    q_b, q_h, q_t, bits_b, bits_t,
    G: gl.constexpr, GROUP: gl.constexpr, OFFSET: gl.constexpr, MASK: gl.constexpr, RINGS: gl.constexpr,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Partial out [ROWS, 128], base-2 lse [ROWS] of all packed rows over a split of the ring or the blocks.

    The first RINGS splits take tiles of the ring in turn, the others equal shares of the blocks, of which
    none may have more than MOST_BLOCKS.
    CHAINED: see `kernels.devices`. The number of blocks and the first of them are read before this kernel
    waits.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16]
    )
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    ACROSS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [0, 1], [0, 8]] + ([[0, 16]] if ROWS == 32 else []),
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0]] * 2,
        block_bases=[],
        shape=[4, ROWS],
    )
    pid, split = gl.program_id(0), gl.program_id(1)
    b, kv, head = pid // G, pid % G, pid.to(gl.int64)
    blocks = gl.load(blocks_ptr + b).to(gl.int32)
    share = gl.cdiv(blocks, splits - RINGS)
    first = (split - RINGS) * share
    last = gl.minimum(first + share, blocks)
    q_head = q_ptr + b.to(gl.int64) * q_b + (kv * GROUP).to(gl.int64) * q_h
    kind: gl.constexpr = q_ptr.dtype.element_ty
    none = gl.zeros([128, ROWS], gl.float32, ACC)
    top = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
    if split < RINGS:
        if CHAINED:
            gdc_wait()
        k_smem = gl.allocate_shared_memory(kind, [128, 128], OPERAND)
        v_smem = gl.allocate_shared_memory(kind, [128, 128], OPERAND)
        p_smem = gl.allocate_shared_memory(kind, [ROWS, 128], OPERAND)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, QUERIES))
        dim = gl.arange(0, 128, gl.SliceLayout(0, QUERIES))
        q_at = (row % GROUP).to(gl.int64) * q_h + (row // GROUP).to(gl.int64) * q_t
        q = gl.load(q_head + q_at[:, None] + dim[None, :], mask=(row < T * GROUP)[:, None], other=0.0)
        q_smem = gl.allocate_shared_memory(kind, [ROWS, 128], OPERAND, q)
        length, begin = gl.load(len_ptr + b).to(gl.int32), blocks * 128
        end = length + T if MASK else length
        column, line = gl.arange(0, ROWS, COLUMN), gl.arange(0, 128, gl.SliceLayout(1, ACC))
        query = column // GROUP
        own_bits = query.to(gl.int64)
        if MASK == 2:
            bits_at = bits_ptr + b.to(gl.int64) * bits_b + query.to(gl.int64) * bits_t
            own_bits = gl.load(bits_at, mask=column < T * GROUP, other=0)
        total, out = gl.zeros([ROWS], gl.float32, COLUMN), none
        token = gl.arange(0, 128, gl.SliceLayout(1, QUERIES))
        for start in range(begin + split * 128, end, RINGS * 128):
            p = start + token
            at = (head * _RING + p % _RING)[:, None] * 128 + dim[None, :]
            there = (p < end)[:, None]
            load_async(k_smem, ring_k_ptr + at, mask=there)
            load_async(v_smem, ring_v_ptr + at, mask=there)
            commit_group()
            wait_group(0)
            fence_async_shared()
            score = warpgroup_mma(k_smem, q_smem.permute((1, 0)), none)
            own = (start + line - length)[:, None]
            seen = own < 0
            if MASK == 1:
                seen = own <= query[None, :]
            if MASK == 2:
                word = own_bits[None, :] >> gl.maximum(own, 0).to(gl.int64)
                seen = seen | ((own < T) & ((word & 1) != 0))
            score = gl.where(seen & ((start + line) < end)[:, None], score * scale2, float("-inf"))
            new = gl.maximum(top, gl.max(score, 0))
            base = gl.where(new == float("-inf"), 0.0, new)
            weight, fade = gl.exp2(score - base[None, :]), gl.exp2(top - base)
            total = gl.fma(total, fade, gl.sum(weight, 0))
            p_smem.permute((1, 0)).store(weight.to(kind))
            fence_async_shared()
            out = warpgroup_mma(v_smem.permute((1, 0)), p_smem.permute((1, 0)), out * fade[None, :])
            top = new
        if CHAINED:
            gdc_launch_dependents()
        share_of = 1.0 / gl.where(total > 0, total, 1.0)
        out, lse = out * share_of[None, :], top + gl.log2(total)
        _finish(out_ptr, lse_ptr, out, lse, line, T * GROUP, splits, ROWS, COLUMN)
    elif first < last:
        row_at = head * BLOCKS
        k_upper_at = k_upper_ptr.to(gl.pointer_type(gl.int16)) + row_at * 4096
        k_lower_at = k_lower_ptr.to(gl.pointer_type(gl.int16)) + row_at * 4096
        v_upper_at = v_upper_ptr.to(gl.pointer_type(gl.int16)) + row_at * 4096
        v_lower_at = v_lower_ptr.to(gl.pointer_type(gl.int16)) + row_at * 4096
        k_step_at, k_zero_at = k_step_ptr + row_at * 128, k_zero_ptr + row_at * 128
        v_step_at, v_zero_at = v_step_ptr + row_at * 128, v_zero_ptr + row_at * 128
        k_upper = gl.allocate_shared_memory(gl.int16, [SLOTS, 128, 32], PLAIN)
        k_lower = gl.allocate_shared_memory(gl.int16, [SLOTS, 128, 32], PLAIN)
        v_upper = gl.allocate_shared_memory(gl.int16, [SLOTS, 64, 64], TURNED)
        v_lower = gl.allocate_shared_memory(gl.int16, [SLOTS, 64, 64], TURNED)
        k_steps = gl.allocate_shared_memory(gl.float16, [SLOTS, 128], LINE)
        v_steps = gl.allocate_shared_memory(gl.float16, [SLOTS, 128], LINE)
        v_zeros = gl.allocate_shared_memory(gl.float16, [SLOTS, 128], LINE)
        q_smem = gl.allocate_shared_memory(gl.float16, [ROWS, 128], OPERAND)
        a_smem = gl.allocate_shared_memory(gl.float16, [ROWS, 128], OPERAND)
        p_smem = gl.allocate_shared_memory(gl.float16, [ROWS, 128], OPERAND)
        c_smem = gl.allocate_shared_memory(gl.float32, [MOST_BLOCKS, ROWS], LINE)
        most_smem = gl.allocate_shared_memory(gl.float32, [4, ROWS], PLAIN)
        unit_smem = gl.allocate_shared_memory(gl.float32, [ROWS], LINE)
        flag_smem = gl.allocate_shared_memory(gl.int32, [4], LINE)
        channel = channels()
        step = gl.load(k_step_at + first * 128 + channel)
        k_zeros = zeros_of(k_zero_at, first, last)
        for early in gl.static_range(SLOTS):
            at = first + early
            ask_numbers(v_steps, early, v_step_at, at, at < last)
            ask_numbers(v_zeros, early, v_zero_at, at, at < last)
            ask_numbers(k_steps, early, k_step_at, at + 1, at + 1 < last)
            ask(k_upper, k_lower, early, k_upper_at, k_lower_at, at, at < last, False)
            if early > 0:
                ask(v_upper, v_lower, early - 1, v_upper_at, v_lower_at, at - 1, at <= last, True)
            else:  # queries would wait until all blocks that were asked for before them have arrived
                if CHAINED:
                    gdc_wait()
                n = gl.arange(0, ROWS, gl.SliceLayout(1, QUERIES))
                q_at = (n % GROUP).to(gl.int64) * q_h + (n // GROUP).to(gl.int64) * q_t
                there = (n < T * GROUP)[:, None]
                exact = gl.load(q_head + q_at[:, None] + channel[None, :], mask=there, other=0.0)
            commit_group()
        exact = exact.to(gl.float32)
        power = gl.ceil(gl.log2(gl.maximum(gl.max(gl.abs(exact), 1), 1e-30)))
        q = (exact * gl.exp2(-power)[:, None]).to(gl.float16)
        q_smem.store(q)
        a_smem.store(by_steps(q, step))
        fence_async_shared()
        norm = gl.exp2(gl.convert_layout(power, COLUMN)) * scale2
        unit_smem.store(norm * _UNIT)
        # zeros, each in the layout of what is added to it
        out, total, zeros = none, _sum_of_thread(none, ROWS), _lines(none, ROWS)[0]
        shared = _times_q(k_zeros, q_smem, ROWS, ACC)
        if OFFSET != 0.0:
            k_sums = _times_q(zeros_of(k_step_at, first, last), q_smem, ROWS, ACC)
            shared = gl.fma(k_sums, gl.full([MOST_BLOCKS, ROWS], OFFSET, gl.float32, ACC), shared)
        # what all scores of a block have in common
        as_table(c_smem, MOST_BLOCKS, ROWS).store(shared * norm[None, :])
        wait_group(SLOTS - 1)
        for block in range(first, last):
            i = block - first
            now = i % SLOTS
            v_step, v_zero = numbers_of(v_steps.index(now), ACC), numbers_of(v_zeros.index(now), ACC)
            if OFFSET != 0.0:
                offset = gl.full([128], OFFSET, gl.float32, gl.SliceLayout(1, ACC))
                v_zero = gl.fma(v_step, offset, v_zero)
            step = key_steps_of(k_steps.index(now))
            near, far = keys_of(k_upper.index(now), k_lower.index(now), ACC)
            score = warpgroup_mma(near, a_smem.slice(0, 64, 1).permute((1, 0)), none, is_async=True)
            score = warpgroup_mma(far, a_smem.slice(64, 64, 1).permute((1, 0)), score, is_async=True)
            score = warpgroup_mma_wait(0, deps=[score])
            c, unit = c_smem.index(i).load(COLUMN), unit_smem.load(COLUMN)
            # a weight times its value's step is kept below 2^15, since fp16 ends at 65504
            most = _most_of_thread(score, ROWS)
            longest = gl.reshape(gl.max(gl.max(gl.reshape(v_step, [2, 4, 2, 8]), 2), 0), [32])
            longest = gl.inline_asm_elementwise(
                LOG2, "=f,f", [longest], dtype=gl.float32, is_pure=True, pack=1
            )
            most = gl.fma(most, _of_column(unit, most), _of_line(longest, most)) + _of_column(c, most)
            over = most > _of_column(top + (SLACK + LIFT), most)
            flag_smem.store(gl.max(gl.reshape(over.to(gl.int32), [4, 8 * ROWS]), 1))
            if gl.max(flag_smem.load(ONE_EACH), 0) > 0:
                most_smem.store(gl.max(gl.reshape(most, [4, 8, ROWS]), 1))
                here = gl.convert_layout(gl.max(most_smem.load(ACROSS), 0), COLUMN)
                new = gl.where(here > top + (SLACK + LIFT), here - LIFT, top)
                fade = gl.exp2(top - new)
                total, zeros = total * _of_column(fade, total), zeros * _of_column(fade, zeros)
                out, top = out * fade[None, :], new
            q = q_smem.load(QUERIES)
            weight = gl.exp2(gl.fma(score, _of_column(unit, score), _of_column(c - top, score)))
            p_smem.permute((1, 0)).store((weight * v_step[:, None]).to(gl.float16))
            a_smem.store(by_steps(q, step))
            fence_async_shared()
            later = block + SLOTS
            ask_numbers(v_steps, now, v_step_at, later, later < last)
            ask_numbers(v_zeros, now, v_zero_at, later, later < last)
            ask_numbers(k_steps, now, k_step_at, later + 1, later + 1 < last)
            ask(k_upper, k_lower, now, k_upper_at, k_lower_at, later, later < last, False)
            before = (i + SLOTS - 1) % SLOTS
            ask(v_upper, v_lower, before, v_upper_at, v_lower_at, later - 1, later <= last, True)
            commit_group()
            wait_group(SLOTS - 1)
            upper_0, upper_1 = halves_of(v_upper.index(now))
            lower_0, lower_1 = halves_of(v_lower.index(now))
            total += _sum_of_thread(weight, ROWS)
            zeros = _plus_products(zeros, weight, _of_line(v_zero, weight), ROWS)
            p_0, p_1 = p_smem.slice(0, 64, 1).permute((1, 0)), p_smem.slice(64, 64, 1).permute((1, 0))
            out = warpgroup_mma(values_of(upper_0, lower_0, ACC), p_0, out, is_async=True)
            out = warpgroup_mma(values_of(upper_1, lower_1, ACC), p_1, out, is_async=True)
            out = warpgroup_mma_wait(0, deps=[out])
        wait_group(0)
        if CHAINED:
            gdc_launch_dependents()
        total = _column_sum(total, most_smem, ROWS, ACROSS, COLUMN)
        zeros = _column_sum(zeros, most_smem, ROWS, ACROSS, COLUMN)
        out = gl.fma(out, gl.full([128, ROWS], _UNIT, gl.float32, ACC), _of_column(zeros, out))
        out, lse = out * (1.0 / total)[None, :], top + gl.log2(total)
        _finish(out_ptr, lse_ptr, out, lse, dimensions(ACC), T * GROUP, splits, ROWS, COLUMN)
    else:
        if CHAINED:
            gdc_wait()
        empty = lse_ptr + (pid * splits + split).to(gl.int64) * ROWS
        gl.store(empty + gl.arange(0, ROWS, COLUMN), top)
