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
from longtrain.kernels.machine_text import Text, laid_out, operands, tensors
from longtrain.kernels.small_linear.kernel import write_sums

LINES, ROWS, INPUTS = 16, 8, 256
"""Lines of a warp, rows of a product, inputs of a step."""


@triton.jit
def _weights(
    codes_ptr, table_ptr, first, second, unit, U, P: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """Words of codes of two units of two eights, [eight, unit | word], and scales and zeros of each word.

    unit: of the first warp, a number.
    """
    i = tl.arange(0, 512 * WARPS)
    k = i // (128 * WARPS)
    own = unit + 2 * ((i >> 7) & (WARPS - 1)) + (k & 1)
    cell = tl.where(k < 2, first, second) + own
    at = tl.max_contiguous(tl.multiple_of(codes_ptr + (cell * 128 + (i & 127)), 16), 4)
    codes = tl.load(at) if EVEN else tl.load(at, mask=tl.max_constancy(own < U, 4), other=0)
    i = tl.arange(0, 128 * P * WARPS)
    k = i // (32 * P * WARPS)
    own = unit + 2 * ((i // (32 * P)) & (WARPS - 1)) + (k & 1)
    cell = tl.where(k < 2, first, second) + own
    at = table_ptr + (cell * 8 + (i // (4 * P) & 7)) * P + i % P
    table = tl.load(at) if EVEN else tl.load(at, mask=own < U, other=0)
    wide = tl.broadcast_to(tl.reshape(table, (128 * P * WARPS, 1)), (128 * P * WARPS, 4 // P))
    return codes, tl.reshape(wide, (512 * WARPS,))


@triton.jit
def _write(
    acc, add_ptr, out_ptr, first, N, F, add_n, out_n, GATED: tl.constexpr, ADD: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Sums of a tile, over the warps, to 8 rows of the output."""
    y = tl.sum(tl.reshape(acc, (4 * WARPS, 128)), 0)
    y = tl.reshape(tl.permute(tl.reshape(y, (8, 4, 2, 2)), (2, 0, 1, 3)), (16, 8))
    write_sums(y, add_ptr, out_ptr, first, N, F, add_n, out_n, GATED, ADD)


@triton.jit(do_not_specialize=["N", "F", "E", "U", "K"])
def int4_kernel(
    x_ptr, codes_ptr, table_ptr, add_ptr, out_ptr, N, F, E, U, K, x_n, add_n, out_n,
    P: tl.constexpr, ONCE: tl.constexpr, ROUNDS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, LATE: tl.constexpr,
    TEXT: tl.constexpr, TEXT_OF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """All rows of tiles of 16 lines; where GATED a tile has 8 gates and what they let pass.

    P: groups of a unit: 1, 2 or 4.
    ONCE: steps of a warp in a round of the pipeline.
    ROUNDS: of a tile. Where there are more than one, a program has one tile.
    EVEN: the steps of all warps are all of K.
    TILES: of 8 rows: 1 or 2.
    LATE: the next kernel may start when the last sums are done, not at once.
    """
    OWN: tl.constexpr = 8 if GATED else 16
    tiles, programs = tl.cdiv(F, OWN), tl.num_programs(0)
    if CHAINED and not LATE:
        gdc_launch_dependents()
    i = tl.arange(0, 512 * WARPS)
    warp = (i >> 7) & (WARPS - 1)
    x_at = x_ptr.to(tl.int64) + 16 * ((i >> 2) & 3) + 512 * warp
    row_at = x_at + ((i >> 4) & 7).to(tl.int64) * (2 * x_n)
    rows = N + 0 * i
    acc = tl.zeros((512 * WARPS,), tl.float32)
    acc_2 = acc
    rounds = ROUNDS if ROUNDS > 1 else tl.cdiv(tiles - tl.program_id(0), programs)
    for q in tl.range(0, rounds, num_stages=STAGES):
        tile = tl.program_id(0) if ROUNDS > 1 else tl.program_id(0) + q * programs
        begin = q * ONCE if ROUNDS > 1 else 0
        first = tile * (OWN // 8)
        second = tl.minimum(first + E // 2 if GATED else first + 1, E - 1)
        if ROUNDS == 1:
            acc = tl.zeros((512 * WARPS,), tl.float32)
            acc_2 = acc
        for j in tl.static_range(ONCE):
            unit = (begin + j) * 2 * WARPS
            codes, table = _weights(codes_ptr, table_ptr, first * U, second * U, unit, U, P, EVEN, WARPS)
            from_row = row_at + unit * 256
            left = K // 32 - 4 * unit - 8 * warp
            wait = q + j + 0 * i
            if TILES == 1:
                acc = tl.inline_asm_elementwise(
                    TEXT, TEXT_OF, (codes, table, wait, left, rows, from_row, acc), dtype=tl.float32,
                    is_pure=False, pack=16,
                )  # fmt: skip
            else:
                acc, acc_2 = tl.inline_asm_elementwise(
                    TEXT, TEXT_OF,
                    (codes, table, wait, left, rows, from_row, acc, from_row + 16 * x_n, acc_2),
                    dtype=(tl.float32, tl.float32), is_pure=False, pack=16,
                )  # fmt: skip
        if ROUNDS == 1:
            _write(acc, add_ptr, out_ptr, tile * OWN, N, F, add_n, out_n, GATED, ADD, WARPS)
            if TILES == 2:
                _write(
                    acc_2, add_ptr + 8 * add_n, out_ptr + 8 * out_n, tile * OWN, N - 8, F, add_n, out_n,
                    GATED, ADD, WARPS,
                )  # fmt: skip
    if CHAINED and LATE:
        gdc_launch_dependents()
    if ROUNDS > 1:
        tile = tl.program_id(0)
        _write(acc, add_ptr, out_ptr, tile * OWN, N, F, add_n, out_n, GATED, ADD, WARPS)
        if TILES == 2:
            _write(
                acc_2, add_ptr + 8 * add_n, out_ptr + 8 * out_n, tile * OWN, N - 8, F, add_n, out_n, GATED,
                ADD, WARPS,
            )  # fmt: skip


@lru_cache(maxsize=8)
def text(tiles: int, groups: int, *, even: bool, chained: bool) -> dict[str, str]:
    """The machine text of a step and its operands.

    Args:
        tiles: of 8 rows: 1 or 2.
        groups: of a unit: 1, 2 or 4.
        even: no input is behind the end of a row.
        chained: it waits for the kernel in front where its third operand is 0.

    Inputs: codes, scales and zeros, 0 in the first step, how many inputs there are (in thirty-twos), how many
    rows, then a tile where the thread's first inputs are, and its sums. Loads are in the text so that the
    compiler neither brings them before the wait nor keeps them.
    A tensor of sums has a set of four for each half of each unit.
    """
    x = Text()
    outputs = tensors(0, tiles)
    codes, table, wait, left, rows, *of_tiles = tensors(tiles, 5 + 2 * tiles)
    ones = [x.made("mov.b32", "0x3F803F80")] * 4
    if chained:
        x.lines.append(".reg .pred %first;")
        x.add(f"setp.eq.s32 %first, {wait[0]}, 0")
        x.add("@%first griddepcontrol.wait")
    row = x.made("shr.u32", x.made("mov.u32", "%laneid"), "2")
    rights: list[list[list[str]]] = []
    for tile in range(tiles):
        here = f"%there{tile}"
        x.lines.append(f".reg .pred {here};")
        x.add(f"setp.lt.s32 {here}, {row}, {rows[0]}")
        row = x.made("add.u32", row, "8")
        rights.append([])
        for block in range(8):
            words = [x.new() for _ in range(4)]
            inside = here
            if not even:
                for word in words:
                    x.add(f"mov.b32 {word}, 0")
                inside = f"%in{tile}_{block}"
                x.lines.append(f".reg .pred {inside};")
                x.add(f"setp.gt.and.s32 {inside}, {left[0]}, {block}, {here}")
            at = f"{of_tiles[2 * tile][0]}+{64 * block}"
            x.add(f"@{inside} ld.global.v4.b32 {{{', '.join(words)}}}, [{at}]")
            rights[tile].append(words)
        for one, old in zip(outputs[tile], of_tiles[2 * tile + 1], strict=True):
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
                left_ = [pairs[eight][2 * half + k] for k in range(2) for eight in range(2)]
                for tile in range(tiles):
                    right = rights[tile][4 * unit + word][2 * half :][:2]
                    x.product(sums[tile][0], left_, right, "bf16")
                    x.product(sums[tile][1], ones, right, "bf16")
            if word % 2 == 1 or groups == 4:
                for tile in range(tiles):
                    for c in range(4):
                        out = outputs[tile][4 * (2 * unit + word // 2) + c]
                        scale, zero = scales[c // 2]
                        x.add(f"fma.rn.f32 {out}, {sums[tile][0][c]}, {scale}, {out}")
                        x.add(f"fma.rn.f32 {out}, {sums[tile][1][c % 2]}, {zero}, {out}")
    return {"TEXT": x.text(), "TEXT_OF": operands(tiles, "rrrrr" + "lf" * tiles)}


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
        once: steps of a warp in a round of the pipeline.
        stages: of the pipeline.
        resident: programs of a multiprocessor.
        late: the next kernel is let in after the sums, not at once.
        registers: most of a thread.
    """

    warps: int = 8
    once: int = 2
    stages: int = 3
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
    of_tile = constants(tile, N, U, table_EU8P2.shape[3], gated=gated, chained=chained["CHAINED"])
    programs = triton.cdiv(features, 8 if gated else 16)
    if of_tile["ROUNDS"] == 1:
        programs = min(programs, tile.resident * cores(x_NK.device, otherwise=1))
    with launched_on(x_NK):
        built = int4_kernel[(programs,)](
            x_NK, codes_EUL4, table_EU8P2.view(torch.int32), add, out_NF, N, features, E, U, K,
            x_NK.stride(0), add.stride(0), out_NF.stride(0), ADD=add_NF is not None,
            **of_tile, num_warps=tile.warps, **register_limit(tile.registers), **chained,
        )  # fmt: skip
    return out_NF if laid_out(built, tile.warps) else None


def tile_for(lines: int, units: int) -> Int4Tile:
    """The tile for so many lines of weights, of so many units of inputs."""
    return Int4Tile()


def constants(
    tile: Int4Tile, rows: int, units: int, groups: int, *, gated: bool, chained: bool
) -> dict[str, int | str]:
    """The kernel's constants for so many rows of input, of so many units, each of so many groups."""
    steps = triton.cdiv(units, 2 * tile.warps)
    once = min(tile.once, steps)
    rounds = triton.cdiv(steps, once)
    even = rounds * once * 2 * tile.warps == units
    tiles = 1 if rows <= ROWS else 2
    return {
        "P": groups,
        "ONCE": once,
        "ROUNDS": rounds,
        "STAGES": tile.stages,
        "EVEN": even,
        "GATED": gated,
        "TILES": tiles,
        "WARPS": tile.warps,
        "LATE": tile.late,
        **text(tiles, groups, even=even, chained=chained),
    }
