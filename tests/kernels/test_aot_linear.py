"""What the compiler makes of the linear layers' kernels for compute capability 9.0, without a GPU."""

import os
from functools import cache

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted, not compiled", allow_module_level=True)

from aot import compile_kernel

from longtrain.kernels.int4_linear import kernel as int4_linear
from longtrain.kernels.machine_text import lays_out
from longtrain.kernels.small_linear import kernel as small_linear_launch
from longtrain.kernels.small_linear import kernel as small_linear_triton

CORE_BYTES, CORE_REGISTERS = 227 * 1024, 65536
"""Shared memory and registers of a multiprocessor."""


def compiled(tile, *, gated, rows, even=True):
    types = {name: "*bf16" for name in ("x_ptr", "weight_ptr", "add_ptr", "out_ptr")}
    constants = {
        "OUTPUTS": tile.outputs, "SLICES": tile.slices, "ROWS": rows, "STEP": tile.step, "EVEN": even,
        "GATED": gated, "ADD": True, "STAGES": tile.stages, "LATE": tile.late, "CHAINED": True,
    }  # fmt: skip
    assert "K" not in small_linear_triton.linear_kernel.do_not_specialize
    aligned = ("x_n", "weight_f", "add_n", "out_n", "K")
    return compile_kernel(
        small_linear_triton.linear_kernel, types, constants, aligned=aligned, warps=tile.warps
    )


@pytest.mark.parametrize(
    ("features", "gated", "rows", "even"),
    [
        (896, False, 8, False), (4096, False, 16, True), (6144, False, 16, True), (128256, False, 8, True),
        (14336, True, 16, False),
    ],
)  # fmt: skip
def test_linear(features, gated, rows, even):
    """Weights come in whole 16 bytes past the registers, also where K ends within a step; nothing spills.

    Each tile once.
    """
    tile = small_linear_launch.tile_for(features, gated=gated)
    built = compiled(tile, gated=gated, rows=rows, even=even)
    assert built.stack_bytes == 0 and built.registers <= 128 and built.shared_bytes <= CORE_BYTES
    product = "HGMMA" if built.count("HGMMA") else "HMMA"
    inner = built.loop_of(product)
    assert built.count("LDGSTS.E.BYPASS.128", inner) >= 8
    assert not any(built.count(name, inner) for name in ("LDG.", "LDL", "STL", "STS", "PRMT"))


@cache
def compiled_int4(tile, constants):
    types = {name: "*bf16" for name in ("x_ptr", "add_ptr", "out_ptr")}
    types |= {"codes_ptr": "*i32", "table_ptr": "*i32"}
    return compile_kernel(
        int4_linear.int4_kernel, types, {**dict(constants), "ADD": False, "CHAINED": True},
        aligned=("x_n", "add_n", "out_n"), warps=tile.warps, registers=tile.registers,
    )  # fmt: skip


def int4(features, inputs, rows, *, gated=False, groups=1):
    """The tile, the kernel's constants and the kernel of so many rows."""
    tile = int4_linear.tile_for(features * (1 + gated), -(-inputs // 128), rows)
    constants = int4_linear.constants(tile, rows, groups, inputs=inputs, gated=gated)
    return tile, constants, compiled_int4(tile, tuple(constants.items()))


SPILLED = {
    4096: {4: 56, 8: 56, 16: 104},
    14336: {2: 88, 4: 88, 8: 88, 16: 88},
}
"""Most bytes of a thread's stack, by inputs and rows: mostly numbers that stay as they are."""


MOST = {1: 1.8, 2: 2.0, 4: 2.1, 8: 2.0, 16: 2.8}
"""Instructions of a thread for each code, by rows."""


@pytest.mark.parametrize(
    ("features", "gated", "inputs", "rows"),
    [
        *((4096, False, 14336, rows) for rows in (1, 16)),
        *(pytest.param(4096, False, 14336, rows, marks=pytest.mark.slow) for rows in (2, 4, 8)),
        pytest.param(14336, True, 4096, 1, marks=pytest.mark.slow),
        (14336, True, 4096, 16),
        pytest.param(4096, False, 4096, 16, marks=pytest.mark.slow),
        (6144, False, 4096, 8),
        (28672, False, 4096, 4),
    ],
)
def test_int4_linear(features, gated, inputs, rows):
    """Codes are unpacked by masks and shifts alone in the registers that products read.

    Weights come in whole 16 bytes, those of the first steps before the kernel in front has ended.
    """
    tile, constants, built = int4(features, inputs, rows, gated=gated)
    assert lays_out(built.ttgir, tile.warps)
    assert built.shared_bytes <= CORE_BYTES // tile.resident
    assert 8 * -(-built.registers // 8) * 32 * tile.warps * tile.resident <= CORE_REGISTERS
    wait = built.instructions.index("ACQBULK")
    assert built.count("LDG.E.128", (0, wait)) == 4 * constants["HELD"], "weights alone are read before it"
    first, last = built.loop_of("HMMA")
    codes = constants["STEPS"] * 16 * 256 / 32
    assert (last - first + 1) / codes <= MOST[rows]
    reads = 4 if constants["KEPT"] else 4 + 8 * constants["TILES"]
    assert built.count("LDG.E.128", (first, last)) == constants["STEPS"] * reads
    products = max(i for i in range(first, last) if built.instructions[i].startswith("HMMA"))
    slow = ("I2F", "F2F", "PRMT", "LDS", "STS", "BAR", "SHFL")
    if rows <= 8:  # else the sums of the first eight may come before the last product
        assert not any(built.count(name, (first, products)) for name in slow), "only the sums at the end may"
    assert built.stack_bytes <= SPILLED[inputs].get(rows, 0)
    assert built.count("STL", (first, last)) <= (7 if rows == 16 else 1)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize(("inputs", "groups"), [(96, 4), (192, 2), (2240, 4), (17408, 1)])
def test_int4_linear_of_other_groups_and_inputs(inputs, groups, rows):
    """Tensors lie as the machine text has it whatever the groups are, and programs fit."""
    tile, constants, built = int4(48, inputs, rows, groups=groups)
    assert lays_out(built.ttgir, tile.warps)
    assert not constants["EVEN"] and built.shared_bytes <= CORE_BYTES
    assert 8 * -(-built.registers // 8) * 32 * tile.warps * tile.resident <= CORE_REGISTERS


def test_words_in_another_order_are_seen():
    """What the compiler made of groups of 64 before both scales of a line were one number."""
    tile, _, built = int4(48, 192, 1, groups=2)
    swapped = built.ttgir.replace("register = [[1], [2], ", "register = [[2], [1], ")
    assert swapped != built.ttgir and not lays_out(swapped, tile.warps)
