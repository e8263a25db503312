"""What the compiler makes of the attention kernels for compute capability 9.0, without a GPU.

The counts are per thread and tile of the inner loop; a 128-token block of one KV head has 32768 codes.
"""

import os
from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted, not compiled", allow_module_level=True)

from aot import compile_kernel, read_at_once, roundings

from longtrain.kernels.hierarchical import attention_kernel as hier_attention_triton
from longtrain.kernels.hierarchical import attention_launch as hier_attention_launch
from longtrain.kernels.hierarchical import fragments_kernel as hier_fragments_triton
from longtrain.kernels.hierarchical import fragments_launch as hier_fragments_launch
from longtrain.kernels.machine_text import lays_out
from longtrain.kernels.tree_attention import kernel as tree
from longtrain.kernels.tree_attention import launch as tree_attention_launch

STRIDES = ("q_b", "q_h", "q_t", "k_b", "k_g", "k_s", "v_b", "v_g", "v_s")


def ends_and_slow_others(tiles):
    """The smallest and the largest tile, which spill first if any does; the others in a release's tests."""
    return [tiles[0], *(pytest.param(tile, marks=pytest.mark.slow) for tile in tiles[1:-1]), tiles[-1]]


@cache
def compiled_tree(tile, *, alone=False, window=0, D=128, per_head=False):
    kind = f"tensordesc<bf16[1,1,{tile.keys},{D}]>" if tile.bulk else "*bf16"
    types = {name: "*bf16" for name in ("q_ptr", "k_ptr", "v_ptr")}
    types |= {"k_tiles": kind, "v_tiles": kind, "len_ptr": "*i64", "bits_ptr": "*i64", "depth_ptr": "*i64"}
    types |= {"first_ptr": "*i64"}
    types |= {"out_ptr": "*fp32", "lse_ptr": "*fp32", "state_ptr": "*fp32", "scale2": "fp32"}
    constants = {
        "G": 8, "GROUP": 4, "D": D, "WIDTH": D, "ROWS": tile.rows, "KEYS": tile.keys, "MASK": 2,
        "WORDS": 1, "BULK": tile.bulk, "STAGES": tile.stages, "CHAINED": True, "AHEAD": tile.ahead,
        "ALONE": alone, "WINDOW": window, "DROPPED": window > 0, "PER_HEAD": per_head,
    }  # fmt: skip
    return compile_kernel(
        tree.attend_kernel, types, constants, aligned=STRIDES, warps=tile.warps, registers=tile.registers
    )


def hier_types(*results):
    """Types of the arguments that both kernels of the hierarchical cache have."""
    codes = ("k_upper_ptr", "k_lower_ptr", "v_upper_ptr", "v_lower_ptr")
    numbers = ("k_step_ptr", "k_zero_ptr", "v_step_ptr", "v_zero_ptr")
    types = {name: "*u8" for name in codes} | {name: "*fp16" for name in numbers}
    types |= {name: "*bf16" for name in ("q_ptr", "ring_k_ptr", "ring_v_ptr")}
    types |= {name: "*i64" for name in ("len_ptr", "blocks_ptr", "bits_ptr")}
    return types | {name: "*fp32" for name in results} | {"scale2": "fp32"}


def compiled_hier(tile, bits, D=128):
    types = hier_types("beta_ptr", "out_ptr", "lse_ptr")
    constants = {
        "G": 8, "GROUP": 4, "D": D, "ROWS": tile.rows, "BITS": bits, "RECENT": tile.recent,
        "OFFSET": 7.5 / 16 if bits == 4 else 0.0, "MASK": 2, "WORDS": 1, "STAGES": tile.stages,
        "PORTABLE": False, "CHAINED": True,
    }  # fmt: skip
    return compile_kernel(
        hier_attention_triton.attend_kernel, types, constants, aligned=("q_b", "q_h", "q_t"),
        warps=tile.warps, registers=tile.registers,
    )  # fmt: skip


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("tile", "per_head"),
    [
        *(
            pytest.param(tile, False, id=f"{tile.rows} rows")
            for tile in (tree_attention_launch.TILES[0], tree_attention_launch.TILES[-1])
        ),
        *(
            pytest.param(tile, False, id=f"{tile.rows} rows", marks=pytest.mark.slow)
            for tile in tree_attention_launch.TILES[1:-1]
        ),
        pytest.param(
            tree_attention_launch.TILES[0],
            True,
            id=f"{tree_attention_launch.TILES[0].rows} rows, places of each head",
        ),
    ],
)
def test_tree_attention(tile, per_head, alone):
    """Nothing is spilled; tiles come by bulk copies; tiles of 64 rows or more use the warp-group products."""
    built = compiled_tree(tile, alone=alone, per_head=per_head)
    assert built.stack_bytes == 0 and built.registers <= 255
    assert built.shared_bytes * tile.resident <= 227 * 1024
    assert built.registers * 32 * tile.warps * tile.resident <= 65536
    product = "HGMMA" if tile.rows >= 64 else "HMMA"
    inner = built.loop_of("UTMALDG")
    assert built.count(product, inner) > 0 and built.count("UTMALDG", inner) == 2
    assert not any(built.count(name, inner) for name in ("LDL", "STL", "LDG"))


@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.slow), 512])
@pytest.mark.parametrize(
    "tile", ends_and_slow_others(tree_attention_launch.WIDE_TILES), ids=lambda tile: f"{tile.rows} rows"
)
def test_tree_attention_of_heads_of_256(tile, window):
    built = compiled_tree(tile, alone=tile.rows > 16, window=window, D=256)
    assert built.stack_bytes == 0 and built.registers <= 255
    assert built.shared_bytes * tile.resident <= 227 * 1024
    assert built.count("HGMMA" if tile.rows >= 64 else "HMMA") > 0


@pytest.mark.parametrize(("alone", "D"), [(False, 128), (True, 64)])
def test_tree_attention_in_a_window(alone, D):
    """Nothing is spilled where every tile is masked. With Triton 3.6 `ptxas` crashed for heads of 64."""
    tile = tree_attention_launch.TILES[0 if not alone else 2]
    built = compiled_tree(tile, alone=alone, window=512, D=D)
    assert built.stack_bytes == 0 and built.registers <= 255
    assert built.count("HGMMA" if tile.rows >= 64 else "HMMA") > 0


def test_the_end_of_tree_attention():
    types = {name: "*bf16" for name in ("q_ptr", "k_ptr", "v_ptr")} | {"len_ptr": "*i64", "bits_ptr": "*i64"}
    types |= {"first_ptr": "*i64"}
    types |= {"out_ptr": "*fp32", "lse_ptr": "*fp32", "state_ptr": "*fp32", "scale2": "fp32"}
    constants = {
        "G": 8, "GROUP": 4, "D": 128, "WIDTH": 128, "ROWS": 64, "KEYS": 64, "OWN": 16, "CHAINED": True,
        "WINDOW": 512, "DROPPED": True, "PER_HEAD": False,
    }  # fmt: skip
    built = compile_kernel(tree.finish_kernel, types, constants, aligned=STRIDES)
    assert built.stack_bytes == 0


def test_bits_of_a_tree():
    types = {"visible_ptr": "*u8", "bits_ptr": "*i64"}
    built = compile_kernel(tree.bits_kernel, types, {"ROWS": 16, "CHAINED": True}, warps=1)
    assert built.stack_bytes == 0 and built.registers <= 168


@pytest.mark.parametrize(
    ("bits", "rows", "most"),
    [(4, 16, 3.4), pytest.param(8, 16, 4.2, marks=pytest.mark.slow), (8, 32, 6.2)],
    ids=lambda x: str(x),
)
def test_hier_attention(bits, rows, most):
    """Codes are unpacked by masks alone, in wide words, and nothing of the inner loop is spilled.

    `most`: instructions of a thread for each code.
    """
    tile = next(tile for tile in hier_attention_launch.TILES[bits] if tile.rows == rows)
    built = compiled_hier(tile, bits)
    assert built.registers * 32 * tile.warps * tile.resident <= 65536
    assert built.shared_bytes * tile.resident <= 227 * 1024
    inner = built.loop_of("LOP3")
    count = {
        name: built.count(name, inner) for name in ("LDL", "STL", "I2F", "LDS.U8", "HADD2", "HMMA", "PRMT")
    }
    assert not any(count[name] for name in ("LDL", "STL", "I2F", "LDS.U8"))
    assert count["PRMT"] <= 8 and count["HADD2"] <= 24 and count["HMMA"] == 64 * rows // 16
    codes = 2 * 128 * 128 / (32 * tile.warps)
    assert (inner[1] - inner[0] + 1) / codes <= most


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_hier_attention_of_heads_of_256(bits):
    tile = hier_attention_launch.WIDE
    built = compiled_hier(tile, bits, D=256)
    assert built.registers * 32 * tile.warps * tile.resident <= 65536
    assert built.shared_bytes * tile.resident <= 227 * 1024 and built.shared_bytes < 99 * 1024
    inner = built.loop_of("LOP3")
    assert not any(built.count(name, inner) for name in ("LDL", "STL", "I2F", "LDS.U8"))
    assert built.count("HMMA", inner) == 128


@cache
def compiled_fragments(tile, bits):
    offset = 7.5 / 16 if bits == 4 else 0.0
    constants = {
        "G": 8, "GROUP": 4, "BITS": bits, "OFFSET": offset, "MASK": 2, "WORDS": 1,
        "RINGS": 2, "STAGES": tile.stages, "WARPS": tile.warps, "TILES": tile.tiles, "PARTS": tile.parts,
        "CHAINED": True, **hier_fragments_launch.texts(tile.tiles, bits, offset),
    }  # fmt: skip
    return compile_kernel(
        hier_fragments_triton.attend_kernel, hier_types("out_ptr", "lse_ptr"), constants,
        aligned=("q_b", "q_h", "q_t"), warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip


def fitting(built, warps):
    """Programs that a multiprocessor of compute capability 9.0 has room for."""
    shared, registers = built.shared_bytes + 1024, 32 * warps * 8 * -(-built.registers // 8)
    return min(228 * 1024 // shared, 65536 // registers)


WIDE = hier_fragments_launch.WIDE_TILES[2]


@pytest.mark.parametrize(
    ("bits", "tile", "most"),
    [
        (4, hier_fragments_launch.TILES[4][0], 2.1),
        pytest.param(4, replace(hier_fragments_launch.TILES[4][0], stages=2), 2.1, marks=pytest.mark.slow),
        pytest.param(4, hier_fragments_launch.tile_for(4, 4, 4, 16), 2.2, marks=pytest.mark.slow),
        pytest.param(4, hier_fragments_launch.TILES[4][1], 2.3, marks=pytest.mark.slow),
        pytest.param(8, hier_fragments_launch.TILES[8][0], 2.4, marks=pytest.mark.slow),
        (8, hier_fragments_launch.TILES[8][1], 2.8),
        (8, WIDE, 2.8),
    ],
    ids=["4-1", "4-1 of two stages", "4-1 of many heads", "4-2", "8-1", "8-2", "8-two parts"],
)
def test_hier_attention_of_few_rows(bits, tile, most):
    """Tensors lie as the machine text has it, blocks come in wide words, and nothing goes round by memory.

    Two parts bring a block once for both. Two tiles at 8 bits may spill a few registers.
    """
    built = compiled_fragments(tile, bits)
    assert lays_out(built.ttgir, tile.warps)
    assert built.stack_bytes <= (96 if bits == 8 and tile.tiles == 2 else 0)
    assert fitting(built, tile.warps) == tile.resident
    later = built.later_rounds("HMMA")
    assert (len(later.instructions) < len(built.instructions)) == (tile.parts == 1), "queries come late"
    built = later
    inner = built.loop_of("HMMA")
    local = built.count("LDL", inner) + built.count("STL", inner)
    assert local <= (30 if bits == 8 and tile.tiles == 2 else 0)
    assert not any(built.count(name, inner) for name in ("STS", "LDS.U8", "LDG.E.U16"))
    assert built.count("LDG.E.64", inner) == 8 and not read_at_once(built, inner)
    assert built.count("LDGSTS.E.BYPASS.128", inner) == 4 * bits // tile.parts
    assert built.count("HMMA", inner) == 64 + 32 * tile.tiles + (16 if bits == 8 else 24)
    codes = 2 * 128 * 128 * (tile.warps // (2 * tile.parts)) / (32 * tile.warps // tile.parts)
    assert (inner[1] - inner[0] + 1) / codes <= most


def test_hier_attention_fits_smaller_gpus():
    """Compute capability 8.6, 8.9 and 12.0 have 99 KB of shared memory for a program."""
    wide, most = hier_fragments_launch.WIDE_TILES[0], 99 * 1024
    assert compiled_fragments(wide, 8).shared_bytes > most
    fewer = replace(wide, stages=hier_fragments_launch.stages_in(wide, 8, most))
    assert fewer.stages == 3 and compiled_fragments(fewer, 8).shared_bytes <= most


@pytest.mark.parametrize("tiles", [hier_fragments_launch.WIDE_TILES, hier_fragments_launch.TILES[4]], ids=len)
def test_a_row_is_rounded_alike_in_every_tile(tiles):
    """What tiles share comes once and all else once a tile, in the same forms.

    A multiprocessor has room for as many programs of each as the tile says, so all are split alike.
    """
    bits = 8 if len(tiles) == 3 else 4
    builds = [compiled_fragments(tile, bits) for tile in tiles]
    assert all(fitting(one, tile.warps) == tile.resident for one, tile in zip(builds, tiles, strict=True))
    rounds = [built.later_rounds("HMMA") for built in builds]
    alone, *others = [roundings(built, built.loop_of("HMMA")) for built in rounds]
    assert sum(alone.values()) > 50
    for tile, found in zip(tiles[1:], others, strict=True):
        assert tile.tiles == 2 and set(found) == set(alone)
        assert all(found[form] in (count, 2 * count) for form, count in alone.items())


def test_another_layout_is_seen():
    built = compiled_fragments(hier_fragments_launch.TILES[4][0], 4)
    assert not lays_out(built.ttgir, 8)
    text = built.ttgir.replace("sizePerThread = [4], threadsPerWarp", "sizePerThread = [2], threadsPerWarp")
    assert not lays_out(text, 4)


def test_a_kernel_that_is_not_there_has_no_loop():
    built = compiled_tree(tree_attention_launch.TILES[0])
    with pytest.raises(ValueError, match="no loop with NOSUCH"):
        built.loop_of("NOSUCH")
