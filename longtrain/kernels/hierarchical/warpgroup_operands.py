"""What `warpgroup_kernel` multiplies: how blocks come into shared memory, and codes into registers.

A product of a warp group has a left operand of 128 lines in registers and a summed index of 64 or 128. With
the bits (h w1 w0 r g2 g1 g0) of a line, where w is the warp, and (h i1 i0 f t1 t0 e) of an index, a thread
has one w, g and t, and all h, r, i, f and e. What lines and indices stand for is chosen so that a thread
finds its part in words of 16 consecutive bytes:

    keys      a line is the token     64 h + 16 (g2 g1) + 4 (w1 w0) + 2 r + g0
    values    a line is the dimension 64 r + 32 h + 8 (w1 w0) + 4 g0 + (g2 g1)
    both      an index is the channel (keys) or the token (values) 64 h + 16 t + 4 i + 2 f + e

and the weights of a product's lines are, in the same order, the right operand of the next.
"""

# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

WARPS = gl.constexpr(4)
MOST_BLOCKS = gl.constexpr(64)
"""Most blocks of a program: the lines of one product, in which their zeros are multiplied by the queries."""
KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [2, 0], [64, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [16, 0], [32, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[128, 32],
    )
)
"""Half words of a block's keys: tokens, and where in a row of 64 bytes."""
VALUES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [32, 0]],
        lane_bases=[[0, 8], [0, 16], [4, 0], [1, 0], [2, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
"""Half words of a block's values: dimensions 0 to 63 (64 to 127 are in the same bytes), and tokens."""
ZEROS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
"""Zeros or steps of keys: a block a line, and channels."""
TOKENS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[2], [64]],
        lane_bases=[[0], [0], [1], [16], [32]],
        warp_bases=[[4], [8]],
        block_bases=[],
        shape=[128],
    )
)
"""Numbers of a block's tokens, in the threads that have their lines."""
CHANNELS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [16], [32]],
        lane_bases=[[2], [4], [8], [64], [0]],
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[128],
    )
)
"""Steps of a block's channels, in the threads that multiply queries by them."""
ONE_EACH = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2]], lane_bases=[[0]] * 5, warp_bases=[[0]] * 2, block_bases=[], shape=[4]
    )
)
"""A number of each warp, all of them in every thread."""
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TURNED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Words of values: rows four apart, which a warp reads together, lie in different banks."""
OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_KEY_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_VALUE_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_NUMBER_COPY = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))

_UNPACK = gl.constexpr("""{
    .reg .b32 moved, near, far;
    shl.b32 moved, $4, 4;
    lop3.b32 near, $5, moved, 0x0F0F0F0F, 0xE4;
    shr.u32 moved, $5, 4;
    lop3.b32 far, moved, $4, 0x0F0F0F0F, 0xE4;
    prmt.b32 $0, near, 0, 0x4240;
    prmt.b32 $1, near, 0, 0x4341;
    prmt.b32 $2, far, 0, 0x4240;
    prmt.b32 $3, far, 0, 0x4341;
}""")
_FOUR = gl.constexpr((gl.float16,) * 4)
_MULTIPLY = gl.constexpr("mul.rn.f16x2 $0, $1, $2;")

_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Whether Gluon's view of shared memory as something else has its later name, without an underscore."""
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Gluon's asynchronous load, whose name has changed."""


@gluon.jit
def ask(upper, lower, slot, upper_at, lower_at, block, keep, OF_VALUES: gl.constexpr):
    """Ask for both planes of a block of keys, or of values."""
    COPY: gl.constexpr = _VALUE_COPY if OF_VALUES else _KEY_COPY
    LINES: gl.constexpr = 64 if OF_VALUES else 128
    WIDTH: gl.constexpr = 4096 // LINES
    row, word = gl.arange(0, LINES, gl.SliceLayout(1, COPY)), gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))
    at = block * 4096 + (row[:, None] * WIDTH + word[None, :])
    load_async(upper.index(slot), upper_at + at, mask=keep)
    load_async(lower.index(slot), lower_at + at, mask=keep)


@gluon.jit
def ask_numbers(smem, slot, at, block, keep):
    """Ask for the steps or zeros of a block."""
    load_async(smem.index(slot), at + block * 128 + gl.arange(0, 128, _NUMBER_COPY), mask=keep)


@gluon.jit
def _left(x, LINES: gl.constexpr, SUMMED: gl.constexpr, ACC: gl.constexpr):
    """Numbers as a left operand; they stay where they are, or the compiler refuses."""
    x = gl.reshape(x, [LINES, SUMMED])
    return gl.convert_layout(x, gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)


@gluon.jit
def _unpacked(upper, lower):
    """Codes of half words (t, i, e): f = 0 and 1 of the first half of a head, then of the second.

    A code n that is left as it is, is the fp16 number n 2^-24: below the normal range, but exact.
    """
    x = [upper, lower]
    return gl.inline_asm_elementwise(_UNPACK, "=&r,=&r,=&r,=&r,r,r", x, dtype=_FOUR, is_pure=True, pack=2)


@gluon.jit
def keys_of(upper, lower, ACC: gl.constexpr):
    """Codes of a block's keys, as left operands of the channels of each half of a head."""
    x = _unpacked(upper.load(KEYS), lower.load(KEYS))
    near = gl.reshape(gl.join(x[0], x[1]), [2, 4, 4, 2, 2, 4, 4, 2, 2])
    far = gl.reshape(gl.join(x[2], x[3]), [2, 4, 4, 2, 2, 4, 4, 2, 2])
    near, far = gl.permute(near, [0, 2, 3, 1, 4, 6, 8, 5, 7]), gl.permute(far, [0, 2, 3, 1, 4, 6, 8, 5, 7])
    return _left(near, 128, 64, ACC), _left(far, 128, 64, ACC)


@gluon.jit
def halves_of(words):
    """Half words of a block's values, of each half of the tokens."""
    x = gl.permute(gl.reshape(words.load(VALUES), [8, 2, 2, 2, 2, 32]), [0, 2, 3, 1, 5, 4])
    return gl.split(gl.reshape(x, [64, 32, 2]))


@gluon.jit
def values_of(upper, lower, ACC: gl.constexpr):
    """Codes of values of half the tokens, as a left operand."""
    x = _unpacked(upper, lower)
    x = gl.reshape(gl.join(gl.join(x[0], x[1]), gl.join(x[2], x[3])), [8, 8, 4, 4, 2, 2, 2])
    return _left(gl.permute(x, [0, 6, 1, 3, 5, 2, 4]), 128, 64, ACC)


@gluon.jit
def dimensions(ACC: gl.constexpr):
    """Dimensions of the lines of `values_of`."""
    line = gl.arange(0, 128, gl.SliceLayout(1, ACC))
    return 64 * ((line >> 3) & 1) + 8 * (line >> 4) + 4 * (line & 1) + ((line >> 1) & 3)


@gluon.jit
def numbers_of(smem, ACC: gl.constexpr):
    """Steps or zeros of the tokens of the lines of `keys_of`."""
    x = gl.permute(gl.reshape(smem.load(TOKENS), [2, 4, 4, 2, 2]), [0, 2, 3, 1, 4])
    x = gl.convert_layout(gl.reshape(x, [128]), gl.SliceLayout(1, ACC), assert_trivial=True)
    return x.to(gl.float32)


@gluon.jit
def channels():
    """Channels of the places of the summed index."""
    at = gl.arange(0, 128, gl.SliceLayout(0, QUERIES))
    return 64 * (at >> 6) + 16 * ((at >> 1) & 3) + 4 * ((at >> 4) & 3) + 2 * ((at >> 3) & 1) + (at & 1)


@gluon.jit
def key_steps_of(smem):
    """Steps of a block's channels, in the order of the summed index."""
    x = gl.permute(gl.reshape(smem.load(CHANNELS), [2, 4, 4, 2, 2]), [0, 2, 3, 1, 4])
    return gl.convert_layout(gl.reshape(x, [128]), gl.SliceLayout(0, QUERIES), assert_trivial=True)


@gluon.jit
def by_steps(q, steps):
    """Queries times the steps of their channels, two at a time."""
    x = [q, steps[None, :]]
    return gl.inline_asm_elementwise(_MULTIPLY, "=r,r,r", x, dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def as_table(smem, LINES: gl.constexpr, ROWS: gl.constexpr):
    """Lines of fp32 numbers that are taken one by one, as a table that is stored at once."""
    if _PUBLIC:
        return smem.reinterpret(gl.float32, [LINES, ROWS], PLAIN)
    else:
        return smem._reinterpret(gl.float32, [LINES, ROWS], PLAIN)


@gluon.jit
def zeros_of(at, first, last):
    """Zeros (or steps) of the keys of a program's blocks, a line a block."""
    block = gl.minimum(first + gl.arange(0, MOST_BLOCKS, gl.SliceLayout(1, ZEROS)), last - 1)
    dim = gl.arange(0, 128, gl.SliceLayout(0, ZEROS))
    return gl.load(at + block.to(gl.int64)[:, None] * 128 + dim[None, :])


@gluon.jit
def zeros_operand(x, ACC: gl.constexpr):
    """What `zeros_of` has brought, as a left operand."""
    x = gl.permute(gl.reshape(x, [MOST_BLOCKS, 2, 4, 4, 2, 2]), [0, 1, 3, 4, 2, 5])
    return _left(x, MOST_BLOCKS, 128, ACC)
