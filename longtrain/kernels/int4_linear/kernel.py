"""Triton kernel of `kernels.int4_linear`, and its launch: a product of few rows with 4-bit weights.

As in `small_linear.kernel` a program has some outputs and all their weights, cut into slices; here each slice
is a product of its own, for a warp or two. With n a code, s and z the scale and zero of a group j of inputs:

    y_fm = sum_j s_fj (sum_k n_fk x_mk) + (z_fj - 8 s_fj) (sum_k x_mk)

A code put under the bits of bf16's 128 is the number 128 + n, exact, and takes no conversion; the product
with ones gives the sums of the input where those of the codes are. PORTABLE does without (the interpreter).
Shapes: N rows, F output features, K input features, J groups of K.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
# ruff: noqa: RUF005
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import chaining, dense_rows, interpreted, launched_on, register_limit
from longtrain.kernels.small_linear.kernel import write_sums

_BASE = tl.constexpr(128)
_CODES = tl.constexpr("""{
    .reg .b32 w;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 w, $4, 8;
    lop3.b32 $1, w, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 w, $4, 4;
    lop3.b32 $2, w, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 w, $4, 12;
    lop3.b32 $3, w, 0x000F000F, 0x43004300, 0xEA;
}""")
_ONES = tl.constexpr("mov.b32 $0, 0x3F803F80; mov.b32 $1, 0x3F803F80; // $2")


@triton.jit
def _numbers(codes, dtype: tl.constexpr, PORTABLE: tl.constexpr):
    """128 + the codes of the first and of the second half of a group, and ones laid out like them."""
    if PORTABLE:
        low, high = ((codes & 15) + _BASE).to(dtype), ((codes >> 4) + _BASE).to(dtype)
        ones = tl.full(codes.shape, 1.0, dtype)
    else:
        low, high = tl.inline_asm_elementwise(
            _CODES, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        ones = tl.inline_asm_elementwise(_ONES, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    return low, high, ones


@triton.jit
def _position(i, PORTABLE: tl.constexpr):
    """Which code of its half a byte has: the middle two of each four change places."""
    if PORTABLE:
        i = tl.where(((i ^ (i >> 1)) & 1) != 0, i ^ 3, i)
    return i


@triton.jit
def _added(acc, codes, table, x_low, x_high, PORTABLE: tl.constexpr):
    """Sums after one more group of each slice."""
    low, high, ones = _numbers(codes, x_low.dtype, PORTABLE)
    x_low, x_high = tl.permute(x_low, (0, 2, 1)), tl.permute(x_high, (0, 2, 1))
    product = tl.dot(high, x_high, tl.dot(low, x_low))
    total = tl.dot(ones, x_high, tl.dot(ones, x_low))
    scale = (table << 16).to(tl.float32, bitcast=True)
    zero = (table & -65536).to(tl.float32, bitcast=True)
    return acc + scale[:, :, None] * product + (zero - (8 + _BASE) * scale)[:, :, None] * total


@triton.jit(do_not_specialize=["N", "F", "J"])
def int4_kernel(
    x_ptr, codes_ptr, table_ptr, add_ptr, out_ptr, N, F, J, x_n, add_n, out_n,
    HALF: tl.constexpr, OUTPUTS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr,
    LOOP: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    STAGES: tl.constexpr, LATE: tl.constexpr, PORTABLE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """OUTPUTS features of all rows; GATED as in `linear_kernel`.

    HALF: bytes of a group.
    HELD: groups of a slice that are read into registers before the input may be.
    LOOP: whether there are more, and GROUPS of them a step.
    EVEN: J is a multiple of what all slices take in a step.
    LATE: the next kernel may start when the sums are done, not at once.
    """
    LINES: tl.constexpr = OUTPUTS * 2 if GATED else OUTPUTS
    first = tl.program_id(0) * OUTPUTS
    reach = HELD
    if LOOP:
        reach += tl.cdiv(tl.cdiv(J, SLICES) - HELD, GROUPS) * GROUPS
    if CHAINED and not LATE:
        gdc_launch_dependents()
    line = tl.arange(0, LINES)[None, :]
    slice_ = tl.arange(0, SLICES)[:, None]
    feature = tl.minimum(first + line % OUTPUTS, F - 1) + line // OUTPUTS * F
    cell = ((feature // 8).to(tl.int64) * J + slice_ * reach) * 8 + feature % 8
    byte = tl.arange(0, HALF)
    codes_at = codes_ptr + cell[:, :, None] * HALF + byte[None, None, :]
    table_at = table_ptr + cell
    row = tl.arange(0, ROWS)
    exists = (row < N)[None, :, None]
    x_at = x_ptr + (row.to(tl.int64) * x_n)[None, :, None] + (slice_ * reach * 2 * HALF)[:, :, None]
    x_at += _position(byte, PORTABLE)[None, None, :]
    codes, tables, xs = (), (), ()
    for j in tl.static_range(HELD):
        if EVEN:
            codes = codes + (tl.load(codes_at + j * (8 * HALF)),)
            tables = tables + (tl.load(table_at + j * 8),)
        else:
            inside = slice_ * reach + j < J
            codes = codes + (tl.load(codes_at + j * (8 * HALF), mask=inside[:, :, None], other=0),)
            tables = tables + (tl.load(table_at + j * 8, mask=inside, other=0),)
    if CHAINED:
        gdc_wait()
    for j in tl.static_range(HELD):
        inside = exists if EVEN else exists & (slice_ * reach + j < J)[:, :, None]
        x_low = tl.load(x_at + j * (2 * HALF), mask=inside, other=0.0)
        x_high = tl.load(x_at + j * (2 * HALF) + HALF, mask=inside, other=0.0)
        xs = xs + ((x_low, x_high),)
    acc = tl.zeros((SLICES, LINES, ROWS), tl.float32)
    for j in tl.static_range(HELD):
        acc = _added(acc, codes[j], tables[j], xs[j][0], xs[j][1], PORTABLE)
    if LOOP:
        for start in tl.range(HELD, reach, GROUPS, num_stages=STAGES):
            for i in tl.static_range(GROUPS):
                group = start + i
                if EVEN:
                    more = tl.load(codes_at + group * (8 * HALF))
                    table = tl.load(table_at + group * 8)
                    low = tl.load(x_at + group * (2 * HALF), mask=exists, other=0.0)
                    high = tl.load(x_at + group * (2 * HALF) + HALF, mask=exists, other=0.0)
                else:
                    within = slice_ * reach + group < J
                    more = tl.load(codes_at + group * (8 * HALF), mask=within[:, :, None], other=0)
                    table = tl.load(table_at + group * 8, mask=within, other=0)
                    low = tl.load(x_at + group * (2 * HALF), mask=exists & within[:, :, None], other=0.0)
                    high = tl.load(
                        x_at + group * (2 * HALF) + HALF, mask=exists & within[:, :, None], other=0.0
                    )
                acc = _added(acc, more, table, low, high, PORTABLE)
    if CHAINED and LATE:
        gdc_launch_dependents()
    write_sums(tl.sum(acc, 0), add_ptr, out_ptr, first, N, F, add_n, out_n, GATED, ADD)


@dataclass(frozen=True)
class Int4Tile:
    """How a program goes through weights.

    Args:
        lines: rows of weights of a program, gates and what they let pass counted both.
        slices: parts of a row that are read side by side, by a warp each.
        held: groups of a slice that a program reads into registers before it may read its input.
        groups: groups of a slice that are read at once after those.
        stages: steps in flight then.
        late: the next kernel is let in after the sums, not at once.
        rows: fewest rows of input that are made room for.
        registers: most of a thread.
    """

    lines: int
    slices: int
    held: int = 4
    groups: int = 1
    stages: int = 4
    late: bool = True
    rows: int = 1
    registers: int | None = None


def small_linear(
    x_NK: Tensor,
    codes_EJ8X: Tensor,
    table_EJ82: Tensor,
    add_NF: Tensor | None,
    *,
    features: int,
    gated: bool = False,
    tile: Int4Tile | None = None,
) -> Tensor:
    """Product of up to 16 rows.

    Args:
        x_NK: rows.
        codes_EJ8X: see `kernels.int4_linear`.
        table_EJ82: scales and zeros, see there.
        add_NF: what is added to the rounded product, or expands to it.
        features: output features; as many gates lie above them where `gated`.
        gated: silu(gate) * up.
        tile: for measurements.
    """
    N, (_, J, _, half) = x_NK.shape[0], codes_EJ8X.shape
    tile = tile or tile_for(features * 2 if gated else features, J, N)
    out_NF = x_NK.new_empty(N, features)
    add = out_NF if add_NF is None else dense_rows(add_NF.expand(out_NF.shape))
    chained = chaining(x_NK.device)
    of_tile = constants(tile, J, gated=gated)
    with launched_on(x_NK):
        int4_kernel[(triton.cdiv(features, of_tile["OUTPUTS"]),)](
            x_NK, codes_EJ8X, table_EJ82.view(torch.int32), add, out_NF, N, features, J,
            x_NK.stride(0), add.stride(0), out_NF.stride(0),
            HALF=half, ROWS=max(tile.rows, triton.next_power_of_2(N)), ADD=add_NF is not None, **of_tile,
            PORTABLE=interpreted(), num_warps=tile.slices,
            **register_limit(tile.registers), **chained,
        )  # fmt: skip
    return out_NF


def tile_for(lines: int, groups: int, rows: int) -> Int4Tile:
    """The tile for so many rows of weights, of so many groups each, and so many rows of input.

    Many rows of weights keep all cores busy by their number; of few, each is cut into more slices, and what a
    program reads is held in registers, unless rows of input need those. With one row of input all programs of
    a few weights run at once, so that the next kernel takes nobody's place when it is let in early.
    """
    if lines >= 16384:
        return Int4Tile(32, 4, held=0, stages=3, late=False)
    if rows > 2:
        return Int4Tile(16, 8, held=0)
    if groups >= 64:
        return Int4Tile(16, 8, late=rows > 1 or lines > 4096)
    if lines > 4096:
        return Int4Tile(16, 8, late=rows > 1, registers=80)
    return Int4Tile(16, 16, late=rows > 1)


def constants(tile: Int4Tile, groups: int, *, gated: bool) -> dict[str, int]:
    """The kernel's constants for rows of so many groups."""
    each = triton.cdiv(groups, tile.slices)
    held = min(tile.held, each)
    reach = held + triton.cdiv(each - held, tile.groups) * tile.groups
    return {
        "OUTPUTS": tile.lines // 2 if gated else tile.lines,
        "SLICES": tile.slices,
        "HELD": held,
        "LOOP": reach > held,
        "GROUPS": tile.groups,
        "EVEN": reach * tile.slices == groups,
        "GATED": gated,
        "STAGES": tile.stages,
        "LATE": tile.late,
    }
