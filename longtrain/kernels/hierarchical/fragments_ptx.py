"""Inline PTX of `fragments_kernel`: products of unpacked codes on tensor cores, one warp at a time.

A thread's registers are fragments of the operands of m16n8k16 products: with g = lane / 4 and t = lane mod 4,
columns (codes as the right operand) or rows (codes as the left) are g, and the summed index runs over the
16 codes of a word of each of the four t. `fragments_kernel` documents the content of every register.
A code n that is masked out of a word has the bits of the subnormal fp16 number n 2^-24, which is exact, and
tensor cores process it at full speed.
"""

from __future__ import annotations

import struct

from longtrain.kernels.machine_text import PER_THREAD, MachineText, float_word, tensors

UNIT = 2.0**-24
"""Value of the code 1 as an operand."""


def half_bits(value: float) -> int:
    """Bits of two fp16 numbers of the same value."""
    bits = struct.unpack("<H", struct.pack("<e", value))[0]
    return bits << 16 | bits


def _constant(x: MachineText, value: float) -> str:
    return x.made("mov.b32", f"0x{half_bits(value):08x}")


def _codes(x: MachineText, words: list[str]) -> tuple[list[str], list[str]]:
    """Four codes of each half of a head, as two pairs: of a word of the upper plane, or of both planes."""
    if len(words) == 1:
        word, shifted = words[0], x.made("shr.u32", words[0], "8")
        low = [x.made("and.b32", one, "0x000F000F") for one in (word, shifted)]
        high = [x.made("and.b32", one, "0x00F000F0") for one in (word, shifted)]
        return low, high
    upper, lower = words
    near = x.made("lop3.b32", lower, x.made("shl.b32", upper, "4"), "0x0F0F0F0F", "0xE4")
    far = x.made("lop3.b32", x.made("shr.u32", lower, "4"), upper, "0x0F0F0F0F", "0xE4")
    halves = []
    for both in (near, far):
        halves.append([x.made("prmt.b32", both, "0", chosen) for chosen in ("0x4240", "0x4341")])
    return halves[0], halves[1]


def scores_text(tiles: int, bits: int, offset: float) -> str:
    """PTX for q·k of 64 tokens with 8 or 16 packed rows.

    Args:
        tiles: number of tiles of 8 packed rows: 1 or 2.
        bits: 4: codes of the upper plane; 8: of both.
        offset: added to a code of the upper plane, in steps.

    Returns:
        Outputs, one tensor per tile: scores. Inputs: keys A, keys B (of each plane), steps, zeros, q of each
        tile.

    Steps are first multiplied into q: q s = a + r with a in fp16. Codes are multiplied by a exactly. The
    remainder r is multiplied by the mean code only, which removes the error that all tokens share.
    """
    x, planes = MachineText(), bits // 4
    inputs = tensors(tiles, 2 * planes + 2 + tiles)
    keys, (step, zero), q = inputs[: 2 * planes], inputs[2 * planes :][:2], inputs[2 * planes + 2 :]
    scale = (1.0 if bits == 4 else 16.0, 16.0)  # of a code, by half of the head
    middle = 7.5 if bits == 4 else 127.5 / 16
    nothing = x.made("mov.b32", "0")
    a, rest = [], []  # rest is -r, and the mean that it is multiplied by is negated, too
    minus = [x.made("neg.f16x2", one) for one in step]
    for tile in range(tiles):
        a.append([x.made("mul.rn.f16x2", q[tile][i], step[i]) for i in range(16)])
        rest.append([x.made("fma.rn.f16x2", q[tile][i], minus[i], a[tile][i]) for i in range(16)])

    def left(parts: list[list[str]], half: int, word: int) -> list[str]:
        first = 8 * half + 2 * word
        second = parts[1] if tiles == 2 else [nothing] * 16
        return [parts[0][first], second[first], parts[0][first + 1], second[first + 1]]

    with_zero, with_rest, with_shift = ([x.zeros() for _ in range(2)] for _ in range(3))
    for half in range(2):
        mean = _constant(x, -(middle + offset) * scale[half])
        shift = _constant(x, offset * scale[half])
        for word in range(4):
            pair = zero[8 * half + 2 * word :][:2]
            x.product(with_zero[half], left(q, half, word), pair)
            x.product(with_rest[half], left(rest, half, word), [mean, mean])
            if offset:
                x.product(with_shift[half], left(a, half, word), [shift, shift])
    by = [float_word(value) for value in (*scale, 1 / UNIT)]
    constant = []
    for tile in range(tiles):
        at = 2 * tile
        total = x.made("add.f32", with_rest[0][at], with_rest[1][at], kind="f32")
        if offset:
            both = x.made("add.f32", with_shift[0][at], with_shift[1][at], kind="f32")
            total = x.made("add.f32", total, both, kind="f32")
        for half in range(2):
            total = x.made("fma.rn.f32", with_zero[half][at], by[half], total, kind="f32")
        constant.append(total)
    for i in range(8):
        sums = x.zeros()
        for word in range(4):
            at = 4 * (i % 4) + word
            halves = _codes(x, [keys[i // 4 + 2 * plane][at] for plane in range(planes)])
            for half in range(2):
                x.product(sums, left(a, half, word), halves[half])
        for tile in range(tiles):
            for e in range(2):
                out = f"${PER_THREAD * tile + 2 * i + e}"
                x.add(f"fma.rn.f32 {out}, {sums[2 * tile + e]}, {by[2]}, {constant[tile]}")
    return x.text()


def values_text(tiles: int, bits: int) -> str:
    """PTX that adds the weighted values of 64 tokens to the sums so far.

    Args:
        tiles: number of tiles of 8 packed rows: 1 or 2.
        bits: 4 or 8, as in `scores_text`.

    Returns:
        Outputs: sums A and sums B of each tile. Inputs: values A, values B (of each plane), then for each
            tile its
        weights and the factor of its sums so far (one number per thread, of row g), then the sums so far.
    """
    x, planes = MachineText(), bits // 4
    outputs, inputs = tensors(0, 2 * tiles), tensors(2 * tiles, 2 * planes + 4 * tiles)
    values, weights, old = inputs[: 2 * planes], inputs[2 * planes :][: 2 * tiles], inputs[-2 * tiles :]
    right, sums = [], []
    for tile in range(tiles):
        p = weights[2 * tile]
        right.append([x.made("cvt.rn.f16x2.f32", p[i + 1], p[i]) for i in range(0, 16, 2)])
        sums.append(
            [[x.made("mov.f32", one, kind="f32") for one in old[2 * tile + part]] for part in range(2)]
        )
    _shrink(x, [weights[2 * tile + 1][0] for tile in range(tiles)], sums)
    for part in range(2):
        for pair in range(2):
            for word in range(4):
                rows_of = [
                    _codes(
                        x,
                        [values[part + 2 * plane][4 * (2 * pair + under) + word] for plane in range(planes)],
                    )
                    for under in range(2)
                ]
                for half in range(2):
                    near, far = (rows_of[under][half] for under in range(2))
                    for tile in range(tiles):
                        first_sum = 8 * pair + 4 * half
                        x.product(
                            sums[tile][part][first_sum : first_sum + 4],
                            [near[0], far[0], near[1], far[1]],
                            right[tile][2 * word : 2 * word + 2],
                        )
    for tile in range(tiles):
        for part in range(2):
            for i in range(16):
                x.add(f"mov.f32 {outputs[2 * tile + part][i]}, {sums[tile][part][i]}")
    return x.text()


def finish_text(bits: int) -> str:
    """PTX for the final results of a tile: sums times a factor of their row and a power of two, plus offset.

    Args:
        bits: 4 or 8, as in `scores_text`.

    Returns:
        Outputs: results A and B. Inputs: factor and offset of the row (one number per thread, of row g), sums
            A
        and B.
    """
    x = MachineText()
    outputs, (factor, summand, *old) = tensors(0, 2), tensors(2, 4)
    sources = _sources(x)
    scale = (1 / UNIT if bits == 4 else 0.0625 / UNIT, 0.0625 / UNIT)  # by half of the head
    moved, plus = _moved(x, factor[0], sources), _moved(x, summand[0], sources)
    by = [[x.made("mul.f32", one, float_word(value), kind="f32") for one in moved] for value in scale]
    for part in range(2):
        for i in range(16):
            x.add(f"fma.rn.f32 {outputs[part][i]}, {old[part][i]}, {by[i // 4 % 2][i % 2]}, {plus[i % 2]}")
    return x.text()


def _shrink(x: MachineText, fades: list[str], sums: list[list[list[str]]]) -> None:
    """Rescale the sums of each tile, if any row of the warp has a new softmax base."""
    x.lines.append(".reg .pred %changed;")
    x.add(f"setp.ne.f32 %changed, {fades[0]}, {float_word(1.0)}")
    for fade in fades[1:]:
        x.add(f"setp.ne.or.f32 %changed, {fade}, {float_word(1.0)}, %changed")
    x.add("vote.sync.any.pred %changed, %changed, 0xffffffff")
    x.add("@!%changed bra unchanged")
    sources = _sources(x)
    for fade, parts in zip(fades, sums, strict=True):
        by = _moved(x, fade, sources)
        for part in parts:
            for i, one in enumerate(part):
                x.add(f"mul.f32 {one}, {one}, {by[i % 2]}")
    x.lines.append("unchanged:")


def _sources(x: MachineText) -> list[str]:
    """Lanes of the threads that have the numbers of rows 2 t and 2 t + 1."""
    lane = x.made("mov.u32", "%laneid")
    first = x.made("shl.b32", x.made("and.b32", lane, "3"), "3")
    return [first, x.made("add.u32", first, "4")]


def _moved(x: MachineText, number: str, sources: list[str]) -> list[str]:
    """Shuffle a row's number from the threads of row g to those with sums of rows 2 t and 2 t + 1."""
    raw = x.made("mov.b32", number)
    moved = [x.made("shfl.sync.idx.b32", raw, source, "0x1f", "0xffffffff") for source in sources]
    return [x.made("mov.b32", one, kind="f32") for one in moved]
