"""Attention over INT8 caches by warp groups, for compute capability 9.0: what it serves, and its rows."""

from dataclasses import replace

import pytest
import torch
from attention_cases import distance, hier_case, mask_named

from longtrain.errors import ConfigError
from longtrain.kernels.hierarchical import reference
from longtrain.kernels.hierarchical.layout import Lens, Split
from longtrain.kernels.tree_attention import CAUSAL


@pytest.fixture
def on_hopper(monkeypatch):
    """The launch of warp groups, as on a GPU of compute capability 9.0 with nothing given up."""
    pytest.importorskip("triton", reason="the kernels need triton")
    from longtrain.kernels import devices
    from longtrain.kernels.hierarchical import warpgroup_launch as warpgroup

    monkeypatch.setattr(warpgroup, "hopper_alone", lambda device: True)
    monkeypatch.setattr(devices, "_given_up", set())
    return warpgroup


def test_what_warp_groups_serve(on_hopper, monkeypatch):
    bf16, cpu = torch.bfloat16, torch.device("cpu")

    def takes(rows=28, bits=8, group=4, D=128, dtype=bf16):
        return on_hopper.takes(rows, bits, group, D, dtype, cpu)

    assert takes() and takes(rows=32) and takes(rows=3, group=3, dtype=torch.float16)
    assert not any((takes(rows=33), takes(bits=4), takes(D=64), takes(dtype=torch.float32)))
    assert not any(takes(rows=group, group=group) for group in (1, 2, 5, 8))
    assert [on_hopper.tile_for(rows).rows for rows in (1, 16, 17, 32)] == [16, 16, 32, 32]
    q, planes, ring, _ = hier_case(split=Split.FLOOR, D=128, H=8, T=7, dtype=bf16)
    assert on_hopper.serves(q, planes, ring, 8) and not on_hopper.serves(q, planes, ring, 4)
    assert not on_hopper.serves(q.half(), planes, ring, 8), "the ring's bits would be read as another type"
    for wrong in ({"rows": 8}, {"rows": 64}, {"slots": 0}):
        with pytest.raises(ConfigError, match="allowed: 16 or 32 rows, one slot or more"):
            on_hopper.WarpGroupTile(**wrong)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not takes()


def test_the_tiles_offered_beside_warp_groups(on_hopper):
    from longtrain.kernels.hierarchical import attention_launch as launch

    for group, rows in ((3, 24), (4, 4), (4, 28), (4, 32)):
        found = launch.candidates(rows, 8, group, 128, torch.bfloat16, torch.device("cpu"))
        assert len(set(found)) == len(found) >= 2 and on_hopper.tile_for(rows) not in found
        assert all(rows <= tile.rows for tile in found if not isinstance(tile, launch.BlockTile))
        assert sum(isinstance(tile, on_hopper.WarpGroupTile) for tile in found) == 1


def test_warp_groups_come_first_and_what_others_have_second(on_hopper, monkeypatch):
    from longtrain.kernels.hierarchical import attention_launch as launch
    from longtrain.kernels.hierarchical import fragments_launch as fragments

    case = hier_case(split=Split.FLOOR, D=128, H=8, T=7, dtype=torch.bfloat16)
    answers = {"first": "by warp groups"}
    monkeypatch.setattr(on_hopper, "hier_attention", lambda *_: answers["first"])
    monkeypatch.setattr(fragments, "serves", lambda *_: True)
    monkeypatch.setattr(fragments, "hier_attention", lambda *_: "by warps on their own")
    assert launch.hier_attention(*case, CAUSAL, 8, 1.0) == "by warp groups"
    assert launch.hier_attention(*case, CAUSAL, 8, 1.0, on_hopper.tile_for(28)) == "by warp groups"
    tile = fragments.WIDE_TILES[2]
    assert launch.hier_attention(*case, CAUSAL, 8, 1.0, tile) == "by warps on their own"
    answers["first"] = None
    assert launch.hier_attention(*case, CAUSAL, 8, 1.0) == "by warps on their own"


@pytest.mark.parametrize(("capability", "there"), [((8, 9), 0), ((9, 0), 1), ((10, 0), 0), ((12, 0), 0)])
def test_later_gpus_have_no_products_of_warp_groups(monkeypatch, capability, there):
    pytest.importorskip("triton", reason="the kernels need triton")
    from longtrain.kernels import devices

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for asked in (devices.compiles_for, devices.hopper_alone):
        asked.cache_clear()
    assert devices.hopper_alone(torch.device("cuda")) is bool(there)
    for asked in (devices.compiles_for, devices.hopper_alone):
        asked.cache_clear()


@pytest.mark.parametrize(
    "stage", ["gluon", "signature", "compiler", "assembler", "passes", "device", "memory"]
)
def test_a_kernel_that_does_not_compile_is_given_up(on_hopper, monkeypatch, caplog, stage):
    """Another takes its place, and that is said once: Gluon changes from one Triton to the next."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    error = {
        "gluon": AttributeError("no such thing in this Gluon"),
        "signature": TypeError("an unexpected keyword argument"),
        "compiler": CompilationError("x", None, "unsupported"),
        "assembler": PTXASError("unsupported"),
        "passes": RuntimeError("PassManager::run failed"),
        "device": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        "memory": torch.OutOfMemoryError("CUDA out of memory"),
    }[stage]
    early = stage in ("gluon", "signature")

    def refused(*_, **__):
        raise error

    monkeypatch.setattr(on_hopper, "_kernel", refused if early else lambda: {(2, 5): refused})
    case = hier_case(split=Split.FLOOR, D=128, H=8, T=7, dtype=torch.bfloat16)
    q = case[0]
    if stage in ("device", "memory"):
        with pytest.raises(type(error), match=str(error)):
            on_hopper.hier_attention(*case, CAUSAL, 8, 1.0, splits=5)
        assert on_hopper.takes(28, 8, 4, 128, q.dtype, q.device)
        return
    if not early:  # a tile of the caller's says nothing of the kernel
        with pytest.raises(type(error)):
            on_hopper.hier_attention(*case, CAUSAL, 8, 1.0, on_hopper.WarpGroupTile(32, slots=6), splits=5)
    for _ in range(2):
        assert on_hopper.hier_attention(*case, CAUSAL, 8, 1.0, splits=5) is None
        assert not on_hopper.takes(28, 8, 4, 128, q.dtype, q.device)
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert f"the fast kernel {on_hopper.NAME}" in record.getMessage()
    assert str(error).splitlines()[-1] in record.getMessage()


@pytest.fixture
def warp_groups():
    """The launch of warp groups, where they run."""
    from longtrain.kernels.devices import hopper_alone
    from longtrain.kernels.hierarchical import warpgroup_launch as warpgroup

    if not hopper_alone(torch.device("cuda")):
        pytest.skip("products of warp groups need compute capability 9.0")
    return warpgroup


def growing_case(**how):
    """Keys whose steps grow up to sixfold, so that a row's base has to move; up to 61 blocks a program."""
    q, planes, ring, lens = hier_case(H=8, D=128, blocks=(301,), recent=(250,), device="cuda", **how)
    growing = torch.linspace(0.1, 6, planes.k_step.shape[2], device="cuda")[:, None]
    planes.k_step.mul_(growing)
    planes.k_zero.mul_(growing)
    ring.k.nan_to_num_()
    ring.v.nan_to_num_()
    return q, planes, ring, lens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("split", "T"), [(Split.FLOOR, 1), (Split.RTN, 4), (Split.FLOOR, 8)], ids=str)
def test_warp_groups_with_many_blocks_a_program(warp_groups, split, T, dtype):
    q, planes, ring, lens = growing_case(split=split, T=T, dtype=dtype)
    how = {"bits": 8, "scale": 128**-0.5}
    tile = warp_groups.tile_for(4 * T)
    for mask in (CAUSAL, None):
        want, want_lse = reference.hier_attention(q.double(), planes, ring, lens, mask, **how)
        for slots, splits in ((2, 3), (3, 7), (2, None)):
            out, lse = warp_groups.hier_attention(
                q, planes, ring, lens, mask, 8, how["scale"], replace(tile, slots=slots), splits
            )
            assert distance(out, want) <= 4e-3
            torch.testing.assert_close(lse.double(), want_lse, atol=6e-3, rtol=0)  # six times the steps


@pytest.mark.gpu
def test_rows_of_warp_groups_move_their_bases_alone(warp_groups):
    """A row's base does not move because another's must; a row that is not finite stays alone, too."""
    q, planes, ring, lens = growing_case(split=Split.FLOOR, T=8, dtype=torch.bfloat16)
    q[:, :, 1::2] *= torch.linspace(0.2, 5, 4, device="cuda").to(q.dtype)[:, None]

    def attended(rows, own_lens):
        return warp_groups.hier_attention(rows, planes, ring, own_lens, CAUSAL, 8, 128**-0.5, splits=3)

    together, lse = attended(q, lens)
    bad = q.clone()
    bad[:, :, 3] = float("nan")
    beside, beside_lse = attended(bad, lens)
    for t in range(8):
        alone, alone_lse = attended(q[:, :, t : t + 1], Lens(lens.len_B + t, lens.blocks_B))
        assert torch.equal(together[:, :, t], alone[:, :, 0]) and torch.equal(lse[..., t], alone_lse[..., 0])
        assert torch.equal(beside[:, :, t], together[:, :, t]) == (t != 3)
    assert beside_lse[..., 3].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("G", "H", "T"), [(2, 2, 21), (1, 3, 8), (2, 4, 13)])
def test_trees_and_spread_queries_by_warp_groups(warp_groups, G, H, T):
    """Groups of 1 to 3, bits above the eighth, and rows of queries that lie apart."""
    q, planes, ring, lens = hier_case(
        split=Split.FLOOR, B=2, G=G, H=H, T=T, D=128, blocks=(9, 0), recent=(140, 3), dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    wide = torch.empty(2, T, H, 136, dtype=q.dtype, device="cuda")[..., :128].transpose(1, 2)
    wide.copy_(q)
    mask, _ = mask_named("tree", 2, T, "cuda")
    how = {"bits": 8, "scale": 128**-0.5}
    want, want_lse = reference.hier_attention(q.double(), planes, ring, lens, mask, **how)
    out, lse = warp_groups.hier_attention(wide, planes, ring, lens, mask, 8, how["scale"])
    assert distance(out, want) <= 4e-3
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=0)
