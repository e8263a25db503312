"""What the compiler makes of the linear layers' kernels for compute capability 9.0, without a GPU."""

import os

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted, not compiled", allow_module_level=True)

from longtrain.kernels import int4_linear_launch, int4_linear_triton, small_linear_launch, small_linear_triton
from longtrain.kernels.aot import compile_kernel

CORE_BYTES, CORE_REGISTERS = 227 * 1024, 65536
"""Shared memory and registers of a multiprocessor."""


def compiled(tile, *, gated, rows):
    types = {name: "*bf16" for name in ("x_ptr", "weight_ptr", "add_ptr", "out_ptr")}
    constants = {
        "OUTPUTS": tile.outputs, "SLICES": tile.slices, "ROWS": rows, "STEP": tile.step, "EVEN": True,
        "GATED": gated, "ADD": True, "AHEAD": tile.ahead, "PIECE": tile.piece,
        "STAGES": tile.stages, "CHAINED": True,
    }  # fmt: skip
    aligned = ("x_n", "weight_f", "add_n", "out_n")
    return compile_kernel(
        small_linear_triton.linear_kernel, types, constants, aligned=aligned, warps=tile.warps
    )


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize(("features", "gated"), [(4096, False), (128256, False), (14336, True)])
def test_linear(features, gated, rows):
    """Weights come in whole 16 bytes past the registers, asked for ahead of the wait; nothing is spilled."""
    built = compiled(small_linear_launch.tile_for(features, gated=gated), gated=gated, rows=rows)
    assert built.stack_bytes == 0 and built.registers <= 128 and built.shared_bytes <= CORE_BYTES
    product = "HGMMA" if built.count("HGMMA") else "HMMA"
    inner = built.loop_of(product)
    assert built.count("LDGSTS.E.BYPASS.128", inner) >= 8
    assert not any(built.count(name, inner) for name in ("LDG.", "LDL", "STL", "STS", "PRMT"))
    assert built.instructions.index("ACQBULK") > built.instructions.index("CCTL.E.PF2")


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("features", "gated"), [(4096, False), (28672, False), (14336, True)])
def test_int4_linear(features, gated, rows):
    """Codes are unpacked by masks alone in the registers that the products read, at most 2.8 instructions a
    code: a core issues 4.1 in the time that its share of the bandwidth brings one."""
    tile = int4_linear_launch.tile_for(features, gated=gated)
    types = {name: "*bf16" for name in ("x_ptr", "add_ptr", "out_ptr")}
    types |= {"codes_ptr": "*u8", "table_ptr": "*i32"}
    constants = {
        "HALF": 64, "OUTPUTS": tile.lines // (1 + gated), "SLICES": tile.slices, "ROWS": rows,
        "GROUPS": tile.groups, "EVEN": True, "GATED": gated, "ADD": False, "AHEAD": tile.ahead,
        "PIECE": tile.piece, "STAGES": tile.stages, "PORTABLE": False, "CHAINED": True,
    }  # fmt: skip
    built = compile_kernel(
        int4_linear_triton.int4_kernel, types, constants, aligned=("x_n", "out_n"), warps=tile.slices
    )
    assert built.stack_bytes == 0 and built.shared_bytes <= CORE_BYTES
    assert built.registers * 32 * tile.slices <= CORE_REGISTERS
    inner = built.loop_of("LOP3")
    assert not any(
        built.count(name, inner) for name in ("LDG.", "LDL", "STL", "STS", "I2F", "PRMT", "LDS.U8")
    )
    codes = tile.lines * 128 * tile.groups / 32
    assert built.count("HMMA", inner) > 0 and (inner[1] - inner[0] + 1) / codes <= 2.8
