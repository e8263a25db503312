"""What the compiler makes of the kernels of importance and of merging, without a GPU."""

import os

import pytest

pytest.importorskip("triton", reason="the kernels need triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted, not compiled", allow_module_level=True)

import torch
from aot import compile_kernel

from longtrain.kernels.hierarchical import fragments_launch as fragments
from longtrain.kernels.importance import Span
from longtrain.kernels.importance import backward as importance_backward
from longtrain.kernels.importance import kernel as importance_triton
from longtrain.kernels.importance import launch as importance_launch
from longtrain.kernels.tree_attention import launch as merging

SPANS = (Span((0, 32), 0, (0, 4096)),)
"""LookaheadKV's 32 rows after a prompt."""
TABLES = {"items_ptr": "*i32", "blocks_ptr": "*i32"}
FLOATS = ("lse", "dot", "mean", "part", "s_ptr", "scale")


def compiled(kernel, tile, constants, *, dim=128, kind="bf16"):
    """A kernel of `importance_launch`, for heads of Llama-3.1-8B in groups of four."""
    size = 4 if kind == "fp32" else 2
    grid = importance_launch._cut(tile, SPANS, 32, 8, dim, size, torch.device("cpu"))
    known = {
        **grid.const,
        "KEYS": grid.keys,
        "CHUNK": importance_launch.CHUNK,
        "SPLITS": importance_launch.SPLITS,
        "G": 8,
    }
    if "own" in kernel.fn.__name__:
        own = importance_launch.OWN_FLOAT if kind == "fp32" else importance_launch.OWN
        known |= {"ROWS": own.rows, "KEYS": own.keys}
        launch = {"warps": own.warps, "stages": own.stages}
    else:
        launch = {"warps": grid.launch["num_warps"], "stages": grid.launch["num_stages"]}
    names = kernel.arg_names
    types = dict(TABLES)
    for name in names:
        if name.endswith("_ptr") and name not in types:
            wide = any(word in name for word in FLOATS) or (name == "out_ptr" and "VALUES" in constants)
            types[name] = "*fp32" if wide else f"*{kind}"
        elif name.startswith("scale"):
            types[name] = "fp32"
    known = {name: value for name, value in {**known, **constants}.items() if name in names}
    strides = [name for name in names if name[-2:] in ("_n", "_h", "_g", "_b", "_t")]
    return compile_kernel(kernel, types, known, aligned=strides, **launch)


KERNELS = {
    "partial lse": (importance_triton.attend_kernel, importance_launch.LSE, {"VALUES": False}),
    "partial output": (importance_triton.attend_kernel, importance_launch.ATTEND, {"VALUES": True}),
    "columns of few rows": (
        importance_triton.column_kernel,
        importance_launch.COLUMN_FEW,
        {"ONE": True, "OWN": False, "MAX": False},
    ),
    "columns of many rows": (
        importance_triton.column_kernel,
        importance_launch.COLUMN_MANY,
        {"ONE": False, "OWN": True, "MAX": True},
    ),
    "merged lse": (importance_triton.merge_lse_kernel, importance_launch.LSE, {}),
    "merged output": (importance_triton.merge_out_kernel, importance_launch.ATTEND, {}),
    "gradients of queries": (
        importance_backward.query_kernel,
        importance_launch.QUERY,
        {"OUT": True, "SCORES": True},
    ),
    "merged gradients": (importance_backward.merge_query_kernel, importance_launch.QUERY, {"SCORES": True}),
    "gradients of own rows": (
        importance_backward.own_kernel,
        importance_launch.QUERY,
        {"OUT": True, "SCORES": True},
    ),
}


@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("name", KERNELS)
def test_importance_compiles_without_spills(name, dim):
    kernel, tile, constants = KERNELS[name]
    built = compiled(kernel, tile, constants, dim=dim)
    kept = 16 if name == "gradients of queries" and dim == 128 else 0  # 4 registers' worth by Triton 3.9
    assert built.stack_bytes <= kept and built.registers <= 255 and built.shared_bytes <= 227 * 1024
    if "merge" not in kernel.fn.__name__:
        assert built.count("HGMMA") + built.count("HMMA") > 0  # products are the tensor cores'


MERGES = {"part_ptr": "*fp32", "part_lse_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"}


def merging_waits_for_memory_alone(kernel, constants, splits, chunk):
    """No spills, and threads meet nowhere: no shared memory, no barrier, no shuffle."""
    constants |= {"G": 8, "GROUP": 4, "SPLITS": splits, "CHUNK": chunk, "CHAINED": True}
    built = compile_kernel(kernel, MERGES, constants, warps=chunk // 32)
    assert built.stack_bytes == 0 and built.count("LDG") >= 2 * min(splits, 32)
    assert not any(built.count(name) for name in ("LDL", "LDS", "STS", "BAR", "SHFL"))


@pytest.mark.parametrize("splits", [2, pytest.param(33, marks=pytest.mark.slow), 128])
def test_merging(splits):
    constants = {"D": 128, "WIDTH": 128, "ROWS": 16}
    merging_waits_for_memory_alone(merging.merging.merge_kernel, constants, splits, merging.CHUNK)


@pytest.mark.parametrize(
    "tile", (fragments.TILES[4][0], fragments.WIDE_TILES[2]), ids=lambda tile: f"{tile.rows} rows"
)
@pytest.mark.parametrize("splits", [pytest.param(16, marks=pytest.mark.slow), 264])
def test_merging_of_fragments(tile, splits):
    """Partial rows lie as the tensor cores left them."""
    constants = {"ROWS": 16 * tile.parts}
    merging_waits_for_memory_alone(fragments.reductions.merge_kernel, constants, splits, tile.chunk)
