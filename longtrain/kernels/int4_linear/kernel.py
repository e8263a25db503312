"""Triton kernel of `kernels.int4_linear`, and its launch: a product of few rows with 4-bit weights.

A warp multiplies 16 lines of weights (two eights) with 8 or 16 rows, 256 inputs a step, by products of tensor
cores that are written out (`machine_text`): only the sums at the end pass through shared memory. The warps of
a program have the same lines and take steps in turn. Each holds the weights of its next HELD steps in
registers, the first of them asked for before the kernel in front has ended. A program goes through one tile
of lines after another, and asks for the next tile's weights before it is done with one.

With n a code, s and z the scale and zero of a group of inputs:

    y_fm = sum over groups of s (sum_k (128 + n_fk) x_mk) + (z - 136 s) (sum_k x_mk)

A code put under the bits of bf16's 128 is the number 128 + n, exact, and takes no conversion; the product
with ones gives the sums of the input. Sums run in the same order whatever the count of rows is.
Shapes: N rows, F output features, K input features, E eights of lines, U units of 128 inputs, P groups of a
unit.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
# ruff: noqa: RUF005
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import chaining, cores, dense_rows, launched_on, register_limit
from longtrain.kernels.machine_text import PER_THREAD, Text, laid_out, operands, tensors
from longtrain.kernels.small_linear.kernel import write_sums

LINES, ROWS, INPUTS = 16, 8, 256
"""Lines of a warp, rows of a product, inputs of a step."""


@triton.jit
def _weights(
    codes_ptr, table_ptr, first, second, unit, U, keep, P: tl.constexpr, EVEN: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Words of codes of two units of two eights, [eight, unit | word], and scales and zeros of each word.

    unit: of the first warp, a number.
    """
    i = tl.arange(0, 512 * WARPS)
    k = i // (128 * WARPS)
    own = unit + 2 * ((i >> 7) & (WARPS - 1)) + (k & 1)
    cell = tl.where(k < 2, first, second) + own
    inside = keep & (i >= 0) if EVEN else keep & (own < U)
    at = tl.max_contiguous(tl.multiple_of(codes_ptr + (cell * 128 + (i & 127)), 16), 4)
    codes = tl.load(at, mask=tl.max_constancy(inside, 4), other=0)
    i = tl.arange(0, 128 * P * WARPS)
    k = i // (32 * P * WARPS)
    own = unit + 2 * ((i // (32 * P)) & (WARPS - 1)) + (k & 1)
    cell = tl.where(k < 2, first, second) + own
    inside = keep & (i >= 0) if EVEN else keep & (own < U)
    table = tl.load(table_ptr + (cell * 8 + (i // (4 * P) & 7)) * P + i % P, mask=inside, other=0)
    wide = tl.broadcast_to(tl.reshape(table, (128 * P * WARPS, 1)), (128 * P * WARPS, 4 // P))
    return codes, tl.reshape(wide, (512 * WARPS,))


@triton.jit
def _inputs(x_ptr, row_words, unit, last, EVEN: tl.constexpr, WARPS: tl.constexpr):
    """Inputs of a row as words of two, of a unit of each warp: [word of codes | its pairs].

    Behind a row's end its last inputs are read again; scales and zeros are 0 there.
    """
    i = tl.arange(0, 512 * WARPS)
    at = (unit + 2 * ((i >> 7) & (WARPS - 1))) * 64 + 16 * (i // (128 * WARPS)) + (i & 15)
    if not EVEN:
        at = tl.minimum(at, last + (i & 3))
    return tl.load(tl.max_contiguous(tl.multiple_of(x_ptr + row_words + at, 16), 4))


@triton.jit
def _row(i, first, N, x_n):
    """Where the row of a thread begins, in words; rows that are not there are the last one."""
    return tl.minimum(first + ((i >> 4) & 7), N - 1).to(tl.int64) * (x_n // 2)


@triton.jit
def _write(
    acc,
    add_ptr,
    out_ptr,
    first,
    N,
    F,
    add_n,
    out_n,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Sums of a tile, over the warps, to 8 rows of the output."""
    y = tl.sum(tl.reshape(acc, (4 * WARPS, 128)), 0)
    y = tl.reshape(tl.permute(tl.reshape(y, (8, 4, 2, 2)), (2, 0, 1, 3)), (16, 8))
    write_sums(y, add_ptr, out_ptr, first, N, F, add_n, out_n, GATED, ADD)


@triton.jit(do_not_specialize=["N", "F", "E", "U", "K"])
def int4_kernel(
    x_ptr, codes_ptr, table_ptr, add_ptr, out_ptr, N, F, E, U, K, x_n, add_n, out_n,
    P: tl.constexpr, HELD: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, LATE: tl.constexpr,
    TEXT: tl.constexpr, TEXT_OF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """All rows of tiles of 16 lines; where GATED a tile has 8 gates and what they let pass.

    P: groups of a unit: 1, 2 or 4.
    HELD: steps in registers.
    STEPS: of a warp, a multiple of HELD.
    EVEN: STEPS of all warps are all of K.
    TILES: of 8 rows: 1 or 2.
    LATE: the next kernel may start when the last sums are done, not at once.
    """
    OWN: tl.constexpr = 8 if GATED else 16
    tiles, programs = tl.cdiv(F, OWN), tl.num_programs(0)
    if CHAINED and not LATE:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    first = tile * (OWN // 8)
    second = tl.minimum(first + E // 2 if GATED else first + 1, E - 1)
    codes, tables = (), ()
    for j in tl.static_range(HELD):
        word, table = _weights(
            codes_ptr, table_ptr, first * U, second * U, j * 2 * WARPS, U, True, P, EVEN, WARPS
        )
        codes, tables = codes + (word,), tables + (table,)
    if CHAINED:
        gdc_wait()
    x_words = x_ptr.to(tl.pointer_type(tl.int32))
    i = tl.arange(0, 512 * WARPS)
    row = _row(i, 0, N, x_n)
    if TILES == 2:
        row_2 = _row(i, 8, N, x_n)
    for tile in tl.range(tl.program_id(0), tiles, programs, num_stages=1):
        following = tile + programs
        first_line = tile * OWN
        acc = tl.zeros((512 * WARPS,), tl.float32)
        if TILES == 2:
            acc_2 = acc
        for start in tl.range(0, STEPS, HELD, num_stages=1):
            more = start + HELD < STEPS
            first = tl.where(more, tile, following) * (OWN // 8)
            second = tl.minimum(first + E // 2 if GATED else first + 1, E - 1)
            later = tl.where(more, start + HELD, 0)
            keep = more | (following < tiles)
            new_codes, new_tables = (), ()
            for j in tl.static_range(HELD):
                unit = (start + j) * 2 * WARPS
                near = _inputs(x_words, row, unit, K // 2 - 4, EVEN, WARPS)
                far = _inputs(x_words, row, unit + 1, K // 2 - 4, EVEN, WARPS)
                if TILES == 1:
                    acc = tl.inline_asm_elementwise(
                        TEXT, TEXT_OF, (codes[j], tables[j], near, far, acc), dtype=tl.float32, is_pure=True,
                        pack=16,
                    )  # fmt: skip
                else:
                    near_2 = _inputs(x_words, row_2, unit, K // 2 - 4, EVEN, WARPS)
                    far_2 = _inputs(x_words, row_2, unit + 1, K // 2 - 4, EVEN, WARPS)
                    acc, acc_2 = tl.inline_asm_elementwise(
                        TEXT, TEXT_OF, (codes[j], tables[j], near, far, acc, near_2, far_2, acc_2),
                        dtype=(tl.float32, tl.float32), is_pure=True, pack=16,
                    )  # fmt: skip
                word, table = _weights(
                    codes_ptr, table_ptr, first * U, second * U, (later + j) * 2 * WARPS, U, keep, P, EVEN,
                    WARPS,
                )  # fmt: skip
                new_codes, new_tables = new_codes + (word,), new_tables + (table,)
            codes, tables = new_codes, new_tables
        if CHAINED and LATE:
            gdc_launch_dependents()
        _write(acc, add_ptr, out_ptr, first_line, N, F, add_n, out_n, GATED, ADD, WARPS)
        if TILES == 2:
            _write(
                acc_2, add_ptr + 8 * add_n, out_ptr + 8 * out_n, first_line, N - 8, F, add_n, out_n, GATED, ADD,
                WARPS,
            )  # fmt: skip


@lru_cache(maxsize=8)
def text(tiles: int, groups: int) -> dict[str, str]:
    """The machine text of a step and its operands.

    Args:
        tiles: of 8 rows: 1 or 2.
        groups: of a unit: 1, 2 or 4.

    Inputs: codes, scales and zeros, then a tile its inputs of the first unit, of the second, and its sums.
    A tensor of sums has a set of four for each half of each unit.
    """
    x = Text()
    outputs, (codes, table, *of_tiles) = tensors(0, tiles), tensors(tiles, 2 + 3 * tiles)
    ones = [x.made("mov.b32", "0x3F803F80")] * 4
    for tile in range(tiles):
        for one, old in zip(outputs[tile], of_tiles[3 * tile + 2], strict=True):
            x.add(f"mov.f32 {one}, {old}")
    for unit in range(2):
        for word in range(4):
            places = [4 * (2 * eight + unit) + word for eight in range(2)]
            if word * groups % 4 == 0:
                scales = [_scale(x, table[place]) for place in places]
            if word % 2 == 0 or groups == 4:
                sums = [(x.zeros(), x.zeros()) for _ in range(tiles)]
            pairs = [_codes(x, codes[place]) for place in places]
            for half in range(2):
                left = [pairs[eight][2 * half + k] for k in range(2) for eight in range(2)]
                for tile in range(tiles):
                    right = of_tiles[3 * tile + unit][4 * word + 2 * half :][:2]
                    x.product(sums[tile][0], left, right, "bf16")
                    x.product(sums[tile][1], ones, right, "bf16")
            if word % 2 == 1 or groups == 4:
                for tile in range(tiles):
                    for c in range(4):
                        out = outputs[tile][4 * (2 * unit + word // 2) + c]
                        scale, zero = scales[c // 2]
                        x.add(f"fma.rn.f32 {out}, {sums[tile][0][c]}, {scale}, {out}")
                        x.add(f"fma.rn.f32 {out}, {sums[tile][1][c % 2]}, {zero}, {out}")
    return {"TEXT": x.text(), "TEXT_OF": operands(tiles, "rr" + "rrf" * tiles)}


def _scale(x: Text, word: str) -> tuple[str, str]:
    """A group's scale, and its zero less 136 scales."""
    scale = x.made("shl.b32", word, "16")
    zero = x.made("and.b32", word, "0xFFFF0000")
    scale, zero = (x.made("mov.b32", one, kind="f32") for one in (scale, zero))
    return scale, x.made("fma.rn.f32", scale, "0fC3080000", zero, kind="f32")


def _codes(x: Text, word: str) -> list[str]:
    """Eight numbers of 128 + a code, as pairs."""
    shifted = [word, *(x.made("shr.u32", word, str(4 * i)) for i in range(1, 4))]
    return [x.made("lop3.b32", one, "0x000F000F", "0x43004300", "0xEA") for one in shifted]


@dataclass(frozen=True)
class Int4Tile:
    """How programs go through weights.

    Args:
        warps: of a program, which share its lines.
        held: steps of a warp that are in registers.
        resident: programs of a multiprocessor.
        late: the next kernel is let in after the sums, not at once.
        registers: most of a thread.
    """

    warps: int = 8
    held: int = 2
    resident: int = 2
    late: bool = False
    registers: int | None = None


def small_linear(
    x_NK: Tensor,
    codes_EUL4: Tensor,
    table_EU8P2: Tensor,
    add_NF: Tensor | None,
    *,
    features: int,
    gated: bool = False,
    tile: Int4Tile | None = None,
) -> Tensor | None:
    """Product of up to 16 rows in bf16.

    Args:
        x_NK: rows.
        codes_EUL4: see `kernels.int4_linear`.
        table_EU8P2: scales and zeros, see there.
        add_NF: what is added to the rounded product, or expands to it.
        features: output features; as many gates lie above them where `gated`.
        gated: silu(gate) * up.
        tile: for measurements.

    Returns:
        None where this compiler does not lay tensors out as the machine text takes them.
    """
    N, K = x_NK.shape
    E, U = codes_EUL4.shape[:2]
    tile = tile or tile_for(features * 2 if gated else features, U)
    x_NK = x_NK if x_NK.stride(0) % 8 == 0 and x_NK.data_ptr() % 16 == 0 else x_NK.clone()
    out_NF = x_NK.new_empty(N, features)
    add = out_NF if add_NF is None else dense_rows(add_NF.expand(out_NF.shape))
    chained = chaining(x_NK.device)
    tiles = triton.cdiv(features, 8 if gated else 16)
    programs = min(tiles, tile.resident * cores(x_NK.device, otherwise=1))
    with launched_on(x_NK):
        built = int4_kernel[(programs,)](
            x_NK, codes_EUL4, table_EU8P2.view(torch.int32), add, out_NF, N, features, E, U, K,
            x_NK.stride(0), add.stride(0), out_NF.stride(0), ADD=add_NF is not None,
            **constants(tile, N, U, table_EU8P2.shape[3], gated=gated),
            num_warps=tile.warps, **register_limit(tile.registers), **chained,
        )  # fmt: skip
    return out_NF if laid_out(built, tile.warps) else None


def tile_for(lines: int, units: int) -> Int4Tile:
    """The tile for so many lines of weights, of so many units of inputs."""
    return Int4Tile()


def constants(tile: Int4Tile, rows: int, units: int, groups: int, *, gated: bool) -> dict[str, int | str]:
    """The kernel's constants for so many rows of input, of so many units, each of so many groups."""
    steps = triton.cdiv(units, 2 * tile.warps)
    held = min(tile.held, steps)
    steps = triton.cdiv(steps, held) * held
    tiles = 1 if rows <= ROWS else 2
    return {
        "P": groups,
        "HELD": held,
        "STEPS": steps,
        "EVEN": steps * 2 * tile.warps == units,
        "GATED": gated,
        "TILES": tiles,
        "WARPS": tile.warps,
        "LATE": tile.late,
        **text(tiles, groups),
    }
