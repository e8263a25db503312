"""Machine text of `cooperative_kernel`: a step over one block of keys, by four warps that share its rows.

Registers of a thread hold parts of the operands of m16n8k16 products, with g = lane / 4 and t = lane mod 4,
as in `fragments_ptx`; here warps also hand numbers to each other through shared memory, which the text
declares: queries times steps (each warp makes a part, and all read them), what rows' scores have in common,
rows' maxima, and the weights of the values. A barrier stands between a write and what reads it.
"""

from __future__ import annotations

from longtrain.kernels.hierarchical.fragments_ptx import (
    PER_THREAD,
    UNIT,
    MachineText,
    codes_of,
    moved,
    number,
    sources,
    tensors,
)

WARPS = 4
"""Warps of a program; each has 32 tokens of a block's keys and 16 byte rows of its values."""
MOST_TILES = 4
"""Tiles of 8 packed rows, one a warp."""
LIFT = 14.0
"""Base-2 logarithm that weights times steps stay below."""
_SHARED = {"queries": 8192, "weights": 8192, "highest": 512, "constants": 256}
SHARED_BYTES = sum(_SHARED.values())
"""Shared memory that the text declares, beside what the kernel has for blocks."""
_BARRIER = "bar.sync 1, 128"


def weights_operands() -> str:
    """Constraints of `weights_text`."""
    return _constraints(2, "rrrrrrrf")


def values_operands() -> str:
    """Constraints of `values_text`."""
    return _constraints(2, "rrfff")


def weights_text(tiles: int, offset: float) -> str:
    """Weights of the values of a block of 128 tokens for 8, 16 or 32 rows, into shared memory.

    Args:
        tiles: tiles of 8 rows: 1, 2 or 4.
        offset: added to a code of the upper plane, in steps.

    Returns:
        Outputs: state; by tile how much older sums shrink, then where the weights are. Inputs: keys (upper,
        lower), steps and zeros of their channels and of the values' tokens, q, and the state so far. State
        has, by tile, the maximum, the thread's sums of weights and of weights times zeros, and what a sum of
        products is multiplied by to be a base-2 logit.
    """
    x = MachineText()
    state_out, more_out = tensors(0, 2)
    upper, lower, step, zero, v_step, v_zero, q, state = tensors(2, 8)
    places = _Places(x)
    _prepare(x, places, step, zero, q, offset)
    x.add(_BARRIER)
    sums = _scores(x, places, tiles, upper, lower)
    fades = _weights(x, places, tiles, sums, v_step, v_zero, state, state_out, offset)
    x.add(_BARRIER)
    for i, value in enumerate([*fades, *["0f3F800000"] * (MOST_TILES - tiles), places.weights]):
        x.add(f"mov.b32 {more_out[i]}, {value}")
    for i in range(MOST_TILES + 1, PER_THREAD):
        x.add(f"mov.b32 {more_out[i]}, 0f00000000")
    return x.text()


def values_text(tiles: int) -> str:
    """Weighted codes of the warp's dimensions over all tokens of the block, added to shrunk sums.

    Args:
        tiles: as in `weights_text`.

    Returns:
        Outputs: sums A and B. Inputs: values (upper, lower), the second output of `weights_text`, old sums.
    """
    x = MachineText()
    outputs = tensors(0, 2)
    upper, lower, more, old_a, old_b = tensors(2, 5)
    _values(x, tiles, more, (upper, lower), (old_a, old_b), outputs)
    return x.text()


def _constraints(outputs: int, inputs: str) -> str:
    return ",".join(["=f"] * (outputs * PER_THREAD) + [kind for kind in inputs for _ in range(PER_THREAD)])


class _Places:
    """Where a thread's numbers lie in shared memory, and which thread it is."""

    def __init__(self, x: MachineText) -> None:
        for name, size in _SHARED.items():
            x.lines.append(f".shared .align 16 .b8 {name}[{size}];")
        thread = x.made("mov.u32", "%tid.x")
        lane = x.made("and.b32", thread, "31")
        warp = x.made("shr.u32", thread, "5")
        g, t = x.made("shr.u32", lane, "2"), x.made("and.b32", lane, "3")
        self.t = t

        def at(name: str, unit: str, size: int) -> str:
            base = x.made("mov.u32", name)
            return x.made("mad.lo.u32", unit, str(size), base)

        own = x.made("mad.lo.u32", warp, "128", lane)
        self.all_queries = at("queries", lane, 16)
        self.own_queries = at("queries", own, 16)
        self.all_constants = at("constants", g, 4)
        self.own_constants = at("constants", x.made("mad.lo.u32", warp, "16", g), 4)
        self.all_highest = at("highest", g, 16)
        row = x.made("mad.lo.u32", t, "8", g)
        self.own_highest = at("highest", x.made("mad.lo.u32", row, "4", warp), 4)
        self.weights = x.made("mov.u32", "weights")
        self.own_weights = _weights_at(x, self.weights, g, x.made("mad.lo.u32", warp, "4", t))


def _weights_at(x: MachineText, base: str, g: str, unit: str) -> str:
    """Where row g has its weights of the tokens 8 unit ..: no two of eight threads meet in a bank."""
    odd = x.made("mul.lo.u32", x.made("and.b32", g, "1"), "6")
    unit = x.made("xor.b32", x.made("xor.b32", unit, x.made("shr.u32", unit, "3")), odd)
    return x.made("mad.lo.u32", x.made("mad.lo.u32", g, "16", unit), "16", base)


def _prepare(
    x: MachineText, places: _Places, step: list[str], zero: list[str], q: list[str], offset: float
) -> None:
    """Queries times steps of the warp's rows and channels, and what those add to the rows' constants.

    See `fragments_ptx.scores_text`. The four registers of a product lie side by side.
    """
    middle, scale = 127.5 / 16, 16.0
    mean, shift = x.constant((middle + offset) * scale), x.constant(offset * scale)
    of_zero, of_rest, of_shift = x.zeros(), x.zeros(), x.zeros()
    for k in range(4):
        own, by = q[4 * k : 4 * k + 4], [step[2 * k + i // 2] for i in range(4)]
        a = [x.made("mul.rn.f16x2", *two) for two in zip(own, by, strict=True)]
        x.add(f"st.shared.v4.b32 [{places.own_queries}+{512 * k}], {{{', '.join(a)}}}")
        rest = [
            x.made("fma.rn.f16x2", one, times, x.made("neg.f16x2", made))
            for one, times, made in zip(own, by, a, strict=True)
        ]
        x.product(of_zero, own, zero[2 * k : 2 * k + 2])
        x.product(of_rest, rest, [mean, mean])
        if offset:
            x.product(of_shift, a, [shift, shift])
    for tile in range(2):
        total = of_rest[2 * tile]
        if offset:
            total = x.made("add.f32", total, of_shift[2 * tile], kind="f32")
        total = x.made("fma.rn.f32", of_zero[2 * tile], number(scale), total, kind="f32")
        x.add(f"st.shared.f32 [{places.own_constants}+{32 * tile}], {total}")


def _scores(
    x: MachineText, places: _Places, tiles: int, upper: list[str], lower: list[str]
) -> list[list[list[str]]]:
    """Sums of the products of codes with 8 numbers a row: [pair of tiles][8 tokens] of four registers."""
    pairs = (tiles + 1) // 2
    sums = [[x.zeros() for _ in range(4)] for _ in range(pairs)]
    for word in range(4):
        a = [
            [
                x.loaded("v4.b32", f"{places.all_queries}+{2048 * pair + 4096 * half + 512 * word}")
                for half in (0, 1)
            ]
            for pair in range(pairs)
        ]
        for i in range(4):
            halves = codes_of(x, [upper[4 * i + word], lower[4 * i + word]])
            for half in range(2):
                for pair in range(pairs):
                    x.product(sums[pair][i], a[pair][half], halves[half])
    return sums


def _weights(
    x: MachineText,
    places: _Places,
    tiles: int,
    sums: list[list[list[str]]],
    v_step: list[str],
    v_zero: list[str],
    state: list[str],
    new_state: list[str],
    offset: float,
) -> list[str]:
    """Weights of the values' codes into shared memory, and the state after this step.

    Returns:
        How much older sums shrink, a number of row g a tile.
    """
    steps, zeros = ([one for word in words[:4] for one in _pair(x, word)] for words in (v_step, v_zero))
    if offset:
        zeros = [
            x.made("fma.rn.f32", s, number(offset), z, kind="f32") for s, z in zip(steps, zeros, strict=True)
        ]
    widest = x.made("max.f32", _quad_max(x, steps), number(1e-30), kind="f32")
    lift = x.made("add.f32", x.made("lg2.approx.f32", widest, kind="f32"), number(-LIFT), kind="f32")
    logits = [
        [sums[tile // 2][i][2 * (tile % 2) + e] for i in range(4) for e in range(2)] for tile in range(tiles)
    ]
    shifts = []
    chosen = ""
    for tile in range(tiles):
        constant = x.made(
            "add.f32",
            *(x.loaded_one(f"{places.all_constants}+{128 * half + 32 * tile}") for half in range(2)),
            kind="f32",
        )
        by = state[12 + tile]
        shifts.append(
            x.made("mul.f32", constant, x.made("mul.f32", by, number(UNIT), kind="f32"), kind="f32")
        )
        most = x.made("fma.rn.f32", _quad_max(x, logits[tile]), by, shifts[tile], kind="f32")
        most = x.made("add.f32", most, lift, kind="f32")
        if not chosen:
            chosen = most
        else:
            mine = x.made("setp.eq.u32", places.t, str(tile), kind="pred")
            chosen = x.made("selp.f32", most, chosen, mine, kind="f32")
    x.add(f"st.shared.f32 [{places.own_highest}], {chosen}")
    x.add(_BARRIER)
    fades = []
    for tile in range(tiles):
        of_warps = x.loaded("v4.f32", f"{places.all_highest}+{128 * tile}", kind="f32")
        old, total, zero_sum = (state[4 * i + tile] for i in range(3))
        new = old
        for one in of_warps:
            new = x.made("max.f32", new, one, kind="f32")
        fade = x.made("ex2.approx.ftz.f32", x.made("sub.f32", old, new, kind="f32"), kind="f32")
        fades.append(fade)
        base = x.made("sub.f32", shifts[tile], new, kind="f32")
        total = x.made("mul.f32", total, fade, kind="f32")
        zero_sum = x.made("mul.f32", zero_sum, fade, kind="f32")
        scaled = []
        for r in range(8):
            logit = x.made("fma.rn.f32", logits[tile][r], state[12 + tile], base, kind="f32")
            weight = x.made("ex2.approx.ftz.f32", logit, kind="f32")
            total = x.made("add.f32", total, weight, kind="f32")
            zero_sum = x.made("fma.rn.f32", weight, zeros[r], zero_sum, kind="f32")
            scaled.append(x.made("mul.f32", weight, steps[r], kind="f32"))
        words = [x.made("cvt.rn.f16x2.f32", scaled[r + 1], scaled[r]) for r in range(0, 8, 2)]
        x.add(f"st.shared.v4.b32 [{places.own_weights}+{2048 * tile}], {{{', '.join(words)}}}")
        for i, value in enumerate((new, total, zero_sum, state[12 + tile])):
            x.add(f"mov.f32 {new_state[4 * i + tile]}, {value}")
    for tile in range(tiles, MOST_TILES):
        for i in range(4):
            x.add(f"mov.f32 {new_state[4 * i + tile]}, {state[4 * i + tile]}")
    return fades


def _values(
    x: MachineText,
    tiles: int,
    more: list[str],
    planes: tuple[list[str], list[str]],
    old: tuple[list[str], list[str]],
    outputs: list[list[str]],
) -> None:
    """See `values_text`."""
    lanes = sources(x)
    lane = x.made("mov.u32", "%laneid")
    g, t = x.made("shr.u32", lane, "2"), x.made("and.b32", lane, "3")
    base = x.made("mov.b32", more[MOST_TILES])
    places = [
        _weights_at(x, base, g, x.made("add.u32", x.made("mul.lo.u32", t, "4"), str(pair)))
        for pair in range(4)
    ]
    sums: list[list[list[str]]] = []
    for tile in range(tiles):
        shrink = moved(x, more[tile], lanes)
        sums.append(
            [
                [x.made("mul.f32", part[4 * tile + i], shrink[i % 2], kind="f32") for i in range(4)]
                for part in old
            ]
        )
    for pair in range(4):
        weights = [x.loaded("v4.b32", f"{places[pair]}+{2048 * tile}") for tile in range(tiles)]
        for one in range(2):
            word = 2 * pair + one
            first, second = (codes_of(x, [plane[8 * u + word] for plane in planes]) for u in range(2))
            for half in range(2):
                left = [first[half][0], second[half][0], first[half][1], second[half][1]]
                for tile in range(tiles):
                    x.product(sums[tile][half], left, weights[tile][2 * one : 2 * one + 2])
    for half in range(2):
        for tile in range(MOST_TILES):
            for i in range(4):
                value = sums[tile][half][i] if tile < tiles else old[half][4 * tile + i]
                x.add(f"mov.f32 {outputs[half][4 * tile + i]}, {value}")


def _pair(x: MachineText, word: str) -> list[str]:
    """Both fp16 numbers of a word in fp32."""
    low, high = x.new("b16"), x.new("b16")
    x.add(f"mov.b32 {{{low}, {high}}}, {word}")
    return [x.made("cvt.f32.f16", one, kind="f32") for one in (low, high)]


def _quad_max(x: MachineText, values: list[str]) -> str:
    """The largest of the numbers of four threads."""
    while len(values) > 1:
        values = [x.made("max.f32", *values[i : i + 2], kind="f32") for i in range(0, len(values), 2)]
    best = values[0]
    for distance in (1, 2):
        raw = x.made("mov.b32", best)
        other = x.made("shfl.sync.bfly.b32", raw, str(distance), "0x1f", "0xffffffff")
        best = x.made("max.f32", best, x.made("mov.b32", other, kind="f32"), kind="f32")
    return best
