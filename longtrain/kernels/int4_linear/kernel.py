"""Triton kernel of `kernels.int4_linear`, and its launch: a product of few tokens with 4-bit weights.

A warp multiplies the weights of 16 output features (two groups of eight, called lines here) with its tokens,
256 inputs per step, by tensor-core products in inline PTX (`texts`): weights go from memory directly to the
registers of the products, and only the final sums use shared memory. The warps of a program have the same
lines and take steps in turn. The weights of a warp's first HELD steps are requested before the preceding
kernel has ended; that many are always in flight, across tiles of lines too.

With n a code, s and z the scale and zero of a group of inputs:

    y_fm = sum over groups of s (sum_k (128 + n_fk) x_mk) + (z - 136 s) (sum_k x_mk)

A code inserted into the mantissa bits of bf16's 128 is the number 128 + n, exactly, without a conversion.

A product has eight columns. With R = 1, 2 or 4 tokens, 8 / R units of 128 inputs are side by side in them, so
that a warp's inputs stay in its registers (KEPT) and sum_k x is computed once. Codes of a unit are multiplied
by the inputs of all these units; in the columns of other units scale and zero are set to 0. So a token's last
bits depend on the number of tokens.

Shapes: N tokens, F output features, K inputs, E groups of eight features, U units, P groups of a unit.
"""

# mypy: disable-error-code="no-untyped-def, assignment, misc"
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
from longtrain.kernels.machine_text import MachineText, float_word, laid_out, operands, tensors
from longtrain.kernels.small_linear.kernel import write_sums

COLUMNS = 8
"""Columns of a product."""
MANY = 16384
"""Number of lines from which on each program has several tiles."""


@triton.jit
def _weights(
    codes_ptr, table_ptr, first, second, unit: tl.constexpr, units, P: tl.constexpr, EVEN: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Load codes, [group, unit | word], of two units of two groups of lines; each word's scale and zero.

    first, second: first units of the groups of lines (64 bits); offsets from them are compile-time constants.
    unit: the first of the two units that the first warp reads.
    units: number of units of a line; 0 to read nothing.
    """
    i = tl.arange(0, 512 * WARPS)
    k = i // (128 * WARPS)
    own = 2 * ((i >> 7) & (WARPS - 1)) + (k & 1)
    inside = units > 0 * i if EVEN else own + unit < units
    at = codes_ptr + tl.where(k < 2, first, second) * 128 + (own * 128 + (i & 127))
    at = tl.max_contiguous(tl.multiple_of(at, 16), 4) + unit * 128
    codes = tl.load(at, mask=tl.max_constancy(inside, 4), other=0)
    if P == 2:  # load both groups of a line as one 64-bit number, for the same word order
        table_ptr = table_ptr.to(tl.pointer_type(tl.int64))
    Q: tl.constexpr = 4 if P == 4 else 1
    i = tl.arange(0, 128 * Q * WARPS)
    k = i // (32 * Q * WARPS)
    own = 2 * ((i // (32 * Q)) & (WARPS - 1)) + (k & 1)
    inside = units > 0 * i if EVEN else own + unit < units
    at = (
        table_ptr
        + tl.where(k < 2, first, second) * (8 * Q)
        + (own * (8 * Q) + (i // (4 * Q) & 7) * Q + i % Q)
    )
    table = tl.load(at + unit * (8 * Q), mask=inside, other=0)
    wide = tl.broadcast_to(tl.reshape(table, (128 * Q * WARPS, 1)), (128 * Q * WARPS, 4 // Q))
    if P == 2:
        wide = (wide >> tl.where(tl.arange(0, 4)[None, :] < 2, 0, 32)).to(tl.int32)
    return codes, tl.reshape(wide, (512 * WARPS,))


@triton.jit
def _inputs(x_ptr, set_, row, N, last, x_n, R: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr):
    """Inputs of a column as words of two numbers: tokens from `row` on, 8 / R units of each.

    Their layout is [word of codes | its pairs]. Tokens after the last are copies of it; inputs after the end
    are those before it, with a scale and zero of 0.
    """
    i = tl.arange(0, 512 * WARPS)
    column = (i >> 4) & 7
    unit = set_ * (8 // R) + column // R  # of the warp
    unit = (unit >> 1) * (2 * WARPS) + 2 * ((i >> 7) & (WARPS - 1)) + (unit & 1)
    at = unit * 64 + 16 * (i // (128 * WARPS)) + (i & 15)
    if not EVEN:
        at = tl.minimum(at, last + (i & 3))
    own = x_ptr + tl.minimum(row + column % R, N - 1).to(tl.int64) * (x_n // 2)
    return tl.load(tl.max_contiguous(tl.multiple_of(own + at, 16), 4))


@triton.jit
def _write(
    acc, add_ptr, out_ptr, first, N, F, add_n, out_n, R: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Reduce a tile's sums over the columns of a token and over the warps, and store R tokens."""
    y = tl.sum(tl.reshape(acc, (4, 128 * WARPS)), 0)
    if R == 1:
        y = tl.sum(tl.sum(tl.reshape(y, (8 * WARPS, 4, 2, 2)), 3), 1)
    elif R < 8:
        y = tl.sum(tl.reshape(y, (8 * WARPS, 8 // R, R // 2, 2, 2)), 1)
    y = tl.sum(tl.reshape(y, (WARPS, 16 * R)), 0)
    if R == 1:
        y = tl.reshape(tl.permute(tl.reshape(y, (8, 2)), (1, 0)), (16, 1))
    else:
        y = tl.reshape(tl.permute(tl.reshape(y, (8, R // 2, 2, 2)), (2, 0, 1, 3)), (16, R))
    write_sums(y, add_ptr, out_ptr, first, N, F, add_n, out_n, GATED, ADD)


@triton.jit(do_not_specialize=["N", "F", "E", "U", "K"])
def int4_kernel(
    x_ptr, codes_ptr, table_ptr, add_ptr, out_ptr, N, F, E, U, K, x_n, add_n, out_n,
    P: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, HELD: tl.constexpr, KEPT: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
    TOTALS: tl.constexpr, TOTALS_OF: tl.constexpr, STEP: tl.constexpr,
    STEP_OF: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """All tokens for tiles of 16 lines; if GATED, a tile has 8 lines of gates and the 8 matching ones of up.

    P: groups of a unit: 1, 2 or 4.
    R: tokens of a product: 1, 2, 4 or 8.
    STEPS: steps of a warp.
    HELD: steps whose weights are in registers or in flight.
    KEPT: True if a warp's inputs stay in registers.
    EVEN: K is a multiple of the inputs that all warps read in a step.
    TILES: products of R tokens: 1, or 2 of 8.
    """
    OWN: tl.constexpr = 8 if GATED else 16
    SETS: tl.constexpr = (2 * STEPS * R + 7) // 8
    tiles, programs = tl.cdiv(F, OWN), tl.num_programs(0)
    if CHAINED:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    first = tile * (OWN // 8)
    second = tl.minimum(first + E // 2 if GATED else first + 1, E - 1)
    codes, tables = (), ()
    for step in tl.static_range(HELD):
        word, table = _weights(
            codes_ptr, table_ptr, first.to(tl.int64) * U, second.to(tl.int64) * U,
            step * 2 * WARPS, U, P, EVEN, WARPS,
        )  # fmt: skip
        codes, tables = codes + (word,), tables + (table,)
    if CHAINED:
        gdc_wait()
    x_words, last = x_ptr.to(tl.pointer_type(tl.int32)), K // 2 - 4
    t = (tl.arange(0, 512 * WARPS) >> 2) & 3
    xs, totals = (), ()
    if KEPT:
        for set_ in tl.static_range(SETS):
            x = _inputs(x_words, set_, 0, N, last, x_n, R, False, WARPS)
            total = tl.inline_asm_elementwise(
                TOTALS, TOTALS_OF, (x,), dtype=tl.float32, is_pure=True, pack=16
            )
            xs, totals = xs + (x,), totals + (total,)
    for tile in tl.range(tl.program_id(0), tiles, programs, num_stages=1):
        following = tile + programs
        acc = tl.zeros((512 * WARPS,), tl.float32)
        if TILES == 2:
            acc_2 = acc
        for step in tl.static_range(STEPS):
            ahead = tile if step + HELD < STEPS else following
            first = ahead * (OWN // 8)
            second = tl.minimum(first + E // 2 if GATED else first + 1, E - 1)
            if KEPT:
                own = t - (step % (4 // R) * R if R < 4 else 0)
                args = (codes[0], tables[0], own, acc, xs[step * R // 4], totals[step * R // 4])
            else:
                args = (
                    codes[0], tables[0], t, acc, _inputs(x_words, 2 * step, 0, N, last, x_n, R, EVEN, WARPS),
                    _inputs(x_words, 2 * step + 1, 0, N, last, x_n, R, EVEN, WARPS),
                )  # fmt: skip
            if TILES == 1:
                acc = tl.inline_asm_elementwise(STEP, STEP_OF, args, dtype=tl.float32, is_pure=True, pack=16)
            else:
                args = args + (
                    acc_2, _inputs(x_words, 2 * step, 8, N, last, x_n, R, EVEN, WARPS),
                    _inputs(x_words, 2 * step + 1, 8, N, last, x_n, R, EVEN, WARPS),
                )  # fmt: skip
                acc, acc_2 = tl.inline_asm_elementwise(
                    STEP, STEP_OF, args, dtype=(tl.float32, tl.float32), is_pure=True, pack=16
                )
            word, table = _weights(
                codes_ptr, table_ptr, first.to(tl.int64) * U, second.to(tl.int64) * U,
                (step + HELD) % STEPS * 2 * WARPS, tl.where(ahead < tiles, U, 0), P, EVEN, WARPS,
            )  # fmt: skip
            codes, tables = codes[1:] + (word,), tables[1:] + (table,)
        _write(acc, add_ptr, out_ptr, tile * OWN, N, F, add_n, out_n, R, GATED, ADD, WARPS)
        if TILES == 2:
            _write(
                acc_2, add_ptr + 8 * add_n, out_ptr + 8 * out_n, tile * OWN, N - 8, F, add_n, out_n, R, GATED,
                ADD, WARPS,
            )  # fmt: skip


@lru_cache(maxsize=16)
def texts(tiles: int, rows: int, groups: int, *, kept: bool) -> dict[str, str]:
    """The kernel's PTX and its operand constraints.

    TOTALS computes from a set of inputs the sums of each word's, [word, column 2 t, or the next]. STEP has
    the operands codes, scales and zeros, t, sums, then a set of inputs and its totals if these are kept, else
    both units' sets; with a second tile, its sums and sets follow. It returns the sums.

    Args:
        tiles: number of products: 1, or 2 of 8 tokens.
        rows: tokens of a product: 1, 2, 4 or 8; a set has 8 / rows units side by side.
        groups: groups of a unit: 1, 2 or 4.
        kept: True if inputs are kept in registers.
    """
    x = MachineText()
    x_in = tensors(1, 1)[0]
    outputs = tensors(0, 1)[0]
    sums = _totals(x, x_in, groups)
    for i, one in enumerate(outputs):
        x.add(f"mov.f32 {one}, {sums[i // 2 * groups // 4][i % 2] if i < 8 else '0f00000000'}")
    return {
        "TOTALS": x.text(), "TOTALS_OF": operands(1, "r"),
        "STEP": _step(tiles, rows, groups, kept=kept),
        "STEP_OF": operands(tiles, "rrr" + ("frf" if kept else "frr") * tiles),
    }  # fmt: skip


def _totals(x: MachineText, words: list[str], groups: int) -> list[list[str]]:
    """Sums of the inputs of each group of a set, fp32: of columns 2 t and 2 t + 1, twice."""
    ones = [x.made("mov.b32", "0x3F803F80")] * 4
    found = [x.zeros() for _ in range(groups)]
    for word in range(4):
        for half in range(2):
            x.product(found[word * groups // 4], ones, words[4 * word + 2 * half :][:2], "bf16")
    return found


def _step(tiles: int, rows: int, groups: int, *, kept: bool) -> str:
    x = MachineText()
    outputs, (codes, table, t, *of_tiles) = tensors(0, tiles), tensors(tiles, 3 + 3 * tiles)
    for tile in range(tiles):
        for i, (one, old) in enumerate(zip(outputs[tile], of_tiles[3 * tile], strict=True)):
            x.add(f"mov.f32 {one}, {old if i < 4 else '0f00000000'}")
    for unit in range(2):
        there = ""
        if rows < 8:
            there = f"%there{unit}"
            x.lines.append(f".reg .pred {there};")
            own = x.made("shr.s32", t[0], "1") if rows == 4 else t[0]
            x.add(f"setp.eq.s32 {there}, {own}, {0 if rows == 1 else unit}")
        columns = [c for c in range(4) if rows > 1 or c % 2 == unit]
        if kept:
            sets = [of_tiles[3 * tile + 1] for tile in range(tiles)]
            totals = [
                [of_tiles[3 * tile + 2][2 * (group * 4 // groups) :][:2] for group in range(groups)]
                for tile in range(tiles)
            ]
        else:
            sets = [of_tiles[3 * tile + 1 + unit] for tile in range(tiles)]
            totals = [_totals(x, one, groups) for one in sets]
        for word in range(4):
            places = [4 * (2 * eight + unit) + word for eight in range(2)]
            if word * groups % 4 == 0:
                scales = [_scale(x, table[place], there) for place in places]
                for tile in range(tiles):
                    for c in columns:
                        one = outputs[tile][c]
                        total = totals[tile][word * groups // 4][c % 2]
                        x.add(f"fma.rn.f32 {one}, {total}, {scales[c // 2][1]}, {one}")
            if word % 2 == 0 or groups == 4:
                sums = [x.zeros() for _ in range(tiles)]
            pairs = [_codes(x, codes[place]) for place in places]
            for half in range(2):
                left = [pairs[eight][2 * half + k] for k in range(2) for eight in range(2)]
                for tile in range(tiles):
                    x.product(sums[tile], left, sets[tile][4 * word + 2 * half :][:2], "bf16")
            if word % 2 == 1 or groups == 4:
                for tile in range(tiles):
                    for c in columns:
                        one = outputs[tile][c]
                        x.add(f"fma.rn.f32 {one}, {sums[tile][c]}, {scales[c // 2][0]}, {one}")
    return x.text()


def _scale(x: MachineText, word: str, there: str) -> tuple[str, str]:
    """A group's scale, and its zero minus 136 scales; both 0 in threads with columns of other units."""
    if there:
        word = x.made("selp.b32", word, "0", there)
    scale = x.made("shl.b32", word, "16")
    zero = x.made("and.b32", word, "0xFFFF0000")
    scale, zero = (x.made("mov.b32", one, kind="f32") for one in (scale, zero))
    return scale, x.made("fma.rn.f32", scale, float_word(-136.0), zero, kind="f32")


def _codes(x: MachineText, word: str) -> list[str]:
    """Eight numbers 128 + code, as pairs."""
    shifted = [word, *(x.made("shr.u32", word, str(4 * i)) for i in range(1, 4))]
    return [x.made("lop3.b32", one, "0x000F000F", "0x43004300", "0xEA") for one in shifted]


@dataclass(frozen=True)
class Int4Tile:
    """Launch parameters of the kernel.

    Args:
        warps: warps of a program, which share its lines.
        held: steps of a warp whose weights are in registers or in flight.
        resident: programs that run on one multiprocessor at a time.
        registers: most registers of a thread; None: the compiler's choice.
    """

    warps: int = 4
    held: int = 2
    resident: int = 2
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
    """Product of up to 16 tokens in bf16 with 4-bit weights.

    Args:
        x_NK: inputs.
        codes_EUL4: see `kernels.int4_linear`.
        table_EU8P2: scales and zeros, see there.
        add_NF: added to the rounded product; broadcast if smaller.
        features: number of output features; with `gated` the weights have as many gates before them.
        gated: True to compute silu(gate) * up.
        tile: launch parameters, for measurements.

    Returns:
        The output, or None if this compiler does not give tensors the layout that the PTX needs.
    """
    N, K = x_NK.shape
    E, U = codes_EUL4.shape[:2]
    tile = tile or tile_for(features * 2 if gated else features, U, N)
    x_NK = x_NK if x_NK.stride(0) % 8 == 0 and x_NK.data_ptr() % 16 == 0 else x_NK.clone()
    out_NF = x_NK.new_empty(N, features)
    add = out_NF if add_NF is None else dense_rows(add_NF.expand(out_NF.shape))
    of_tile = constants(tile, N, table_EU8P2.shape[3], inputs=K, gated=gated)
    tiles = triton.cdiv(features, 8 if gated else 16)
    programs = min(tiles, tile.resident * cores(x_NK.device, otherwise=1))
    with launched_on(x_NK):
        built = int4_kernel[(programs,)](
            x_NK, codes_EUL4, table_EU8P2.view(torch.int32), add, out_NF, N, features, E, U, K,
            x_NK.stride(0), add.stride(0), out_NF.stride(0), ADD=add_NF is not None, **of_tile,
            num_warps=tile.warps, **register_limit(tile.registers), **chaining(x_NK.device),
        )  # fmt: skip
    return out_NF if laid_out(built, tile.warps) else None


def tile_for(lines: int, units: int, rows: int) -> Int4Tile:
    """The tile for a number of lines, units of inputs, and tokens.

    Long lines are shared by more warps; with many lines a program has several tiles, and with few tokens two
    programs of eight warps have the most loads in flight, with memory left for the next kernel's weights.
    """
    if units > 128:
        return Int4Tile(16, held=2, resident=1, registers=128)
    if units > 64:
        return Int4Tile(8, held=4, resident=1) if rows == 1 else Int4Tile(8, registers=128)
    warps = min(4, triton.next_power_of_2(triton.cdiv(units, 2)))
    if lines < MANY or units < 16:
        return Int4Tile(warps, held=1, resident=3, registers=168)
    if rows == 2:
        return Int4Tile(warps, held=4)
    return Int4Tile(8, registers=128) if rows <= 4 else Int4Tile(warps, held=3, resident=3)


def constants(tile: Int4Tile, rows: int, groups: int, *, inputs: int, gated: bool) -> dict[str, int | str]:
    """The kernel's constants for this number of tokens, and of groups of a unit of 128 inputs."""
    steps = triton.cdiv(inputs, 256 * tile.warps)
    of_product = min(COLUMNS, triton.next_power_of_2(rows))
    kept = of_product < COLUMNS and steps * of_product <= 8
    of_product = of_product if kept else COLUMNS
    tiles = 1 if rows <= COLUMNS else 2
    return {
        "P": groups,
        "R": of_product,
        "STEPS": steps,
        "HELD": min(tile.held, steps),
        "KEPT": kept,
        "EVEN": steps * 256 * tile.warps == inputs,
        "GATED": gated,
        "TILES": tiles,
        "WARPS": tile.warps,
        **texts(tiles, of_product, groups, kept=kept),
    }
