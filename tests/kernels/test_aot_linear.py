"""What the compiler makes of the linear layers' kernels for compute capability 9.0, without a GPU."""

import os

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted, not compiled", allow_module_level=True)

from aot import compile_kernel

from longtrain.kernels.int4_linear import kernel as int4_linear_launch
from longtrain.kernels.int4_linear import kernel as int4_linear_triton
from longtrain.kernels.small_linear import kernel as small_linear_launch
from longtrain.kernels.small_linear import kernel as small_linear_triton

CORE_BYTES, CORE_REGISTERS = 227 * 1024, 65536
"""Shared memory and registers of a multiprocessor."""


def compiled(tile, *, gated, rows):
    types = {name: "*bf16" for name in ("x_ptr", "weight_ptr", "add_ptr", "out_ptr")}
    constants = {
        "OUTPUTS": tile.outputs, "SLICES": tile.slices, "ROWS": rows, "STEP": tile.step, "EVEN": True,
        "GATED": gated, "ADD": True, "STAGES": tile.stages, "LATE": tile.late, "CHAINED": True,
    }  # fmt: skip
    aligned = ("x_n", "weight_f", "add_n", "out_n")
    return compile_kernel(
        small_linear_triton.linear_kernel, types, constants, aligned=aligned, warps=tile.warps
    )


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize(
    ("features", "gated"), [(4096, False), (6144, False), (128256, False), (14336, True)]
)
def test_linear(features, gated, rows):
    """Weights come in whole 16 bytes past the registers; nothing is spilled."""
    tile = small_linear_launch.tile_for(features, gated=gated)
    built = compiled(tile, gated=gated, rows=rows)
    assert built.stack_bytes == 0 and built.registers <= 128 and built.shared_bytes <= CORE_BYTES
    product = "HGMMA" if built.count("HGMMA") else "HMMA"
    inner = built.loop_of(product)
    assert built.count("LDGSTS.E.BYPASS.128", inner) >= 8
    assert not any(built.count(name, inner) for name in ("LDG.", "LDL", "STL", "STS", "PRMT"))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("features", "gated", "inputs"),
    [
        (4096, False, 4096),
        (4096, False, 14336),
        (6144, False, 4096),
        (28672, False, 4096),
        (14336, True, 4096),
    ],
)
def test_int4_linear(features, gated, inputs, rows):
    """Codes are unpacked by masks alone in the registers that the products read, at most 3.1 instructions a
    code: a core issues 4.1 in the time that its share of the bandwidth brings one."""
    tile = int4_linear_launch.tile_for(features * (1 + gated), inputs // 128, rows)
    types = {name: "*bf16" for name in ("x_ptr", "add_ptr", "out_ptr")}
    types |= {"codes_ptr": "*u8", "table_ptr": "*i32"}
    constants = {
        **int4_linear_launch.constants(tile, inputs // 128, gated=gated), "HALF": 64, "ROWS": rows,
        "ADD": False, "PORTABLE": False, "CHAINED": True,
    }  # fmt: skip
    built = compile_kernel(
        int4_linear_triton.int4_kernel, types, constants, aligned=("x_n", "out_n"), warps=tile.slices,
        registers=tile.registers,
    )  # fmt: skip
    assert built.stack_bytes == 0 and built.shared_bytes <= CORE_BYTES
    assert built.registers * 32 * tile.slices <= CORE_REGISTERS
    slow = ("LDL", "STL", "I2F", "PRMT", "LDS.U8")
    assert sum(built.count(name) for name in slow) <= 16, "the sums at the end may take some"
    codes = tile.lines * 128 / 32
    if constants["LOOP"]:
        inner = built.loop_of("LOP3")
        assert not any(built.count(name, inner) for name in (*slow, "LDG.", "STS"))
        assert (inner[1] - inner[0] + 1) / (codes * tile.groups) <= 3.1
    if constants["HELD"]:
        last = built.instructions.index("ACQBULK")
        assert built.count("LDG.E.128", (0, last)) >= constants["HELD"], "weights are read before the wait"
