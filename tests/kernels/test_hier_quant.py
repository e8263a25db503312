"""Codes, bytes and errors of the hierarchical cache's quantiser."""

import pytest
import torch
from hier_cases import planes_of, ring_of, rows, same, strided

from longtrain.errors import DataError
from longtrain.kernels import hierarchical
from longtrain.kernels.hierarchical import reference
from longtrain.kernels.hierarchical.layout import BLOCK, Lens, Split, check_shape


def test_where_each_code_lies():
    """Byte b of four holds positions 0, 2, 1, 3; dimension j is in bits 0-3, j + D/2 in bits 4-7."""
    code = torch.randint(16, (128, 64), dtype=torch.uint8)
    key, value = reference.pack_rows(code), reference.pack_columns(code)
    assert key.shape == (128, 32) and value.shape == (32, 128)
    order = [0, 2, 1, 3]
    for j in range(32):
        byte = j // 4 * 4 + order[j % 4]
        assert torch.equal(key[:, byte], code[:, j] | code[:, j + 32] << 4)
    for t in range(128):
        byte = t // 4 * 4 + order[t % 4]
        assert torch.equal(value[:, byte], code[t, :32] | code[t, 32:] << 4)
    assert torch.equal(reference.unpack_rows(key), code) and torch.equal(
        reference.unpack_columns(value), code
    )


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("split", Split)
def test_errors_are_bounded_by_the_step(split, dim):
    """FLOOR: half a code of 256 and 8 of them; RTN: a whole code (its residual has no +1/2), half a step."""
    x = rows(4, 128, 64).double()
    upper, lower, step, zero = (part.double() for part in reference.quantise(x, dim, split))
    eight = zero + step / 16 * (16 * upper + lower - split.lower_offset)
    four = zero + step * (upper + split.upper_offset)
    rounding = 2e-6 * x.abs().amax(dim, keepdim=True)  # fp32 arithmetic on numbers of this size
    half_code = 1 / 32 if split is Split.FLOOR else 1 / 16
    assert ((eight - x).abs() <= half_code * step + rounding).all()
    assert ((four - x).abs() <= 0.5 * step + rounding).all()
    assert (zero <= x + rounding).all() and (step >= 2.0**-14).all()
    assert (x <= zero + step * reference.LEVELS[split] + rounding).all()
    assert int(upper.max()) == 15 and int(lower.max()) <= 15


def test_a_step_is_no_wider_than_its_range_needs():
    x = torch.randn(50, 128) * 3
    for split in Split:
        _, _, step, zero = reference.quantise(x, -1, split)
        span = x.amax(-1, keepdim=True) - zero.float()
        assert (step.float() * reference.LEVELS[split] <= span * (1 + 2**-9)).all()
        assert (x.amin(-1, keepdim=True) - zero.float() <= x.abs().amax() * 2**-9).all()


def test_the_cut_code_is_nearer_than_the_residual_for_both_readers():
    x = torch.randn(64, 128) + 8 * torch.randn(64, 1)
    found = {}
    for split in Split:
        upper, lower, step, zero = (part.float() for part in reference.quantise(x, -1, split))
        four = zero + step * (upper + split.upper_offset)
        eight = zero + step / 16 * (16 * upper + lower - split.lower_offset)
        found[split] = [float((y - x).square().mean().sqrt()) for y in (four, eight)]
    assert found[Split.FLOOR][0] < found[Split.RTN][0] and found[Split.FLOOR][1] < found[Split.RTN][1]


def test_rtn_is_the_papers():
    """u = round((x - z) / s), l = round(e / (s / 16)), on a group whose step is exact in fp16."""
    x = torch.arange(0, 61).float()[None] / 4  # 0..15: s = 1
    upper, lower, step, zero = reference.quantise(x, -1, Split.RTN)
    assert float(step) == 1 and float(zero) == 0
    expected_u = x.round()
    expected_l = ((x - expected_u) * 16).round().clamp(-8, 7)
    assert torch.equal(upper.float(), expected_u.clamp(max=15)) and torch.equal(lower.float() - 8, expected_l)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("dim", [64, 128])
def test_blocks_read_back(split, dim):
    k, v = (strided(rows(2, 2, 384, dim, seed=seed)) for seed in (3, 4))
    planes = planes_of(split, dim=dim).layer(0)
    hierarchical.quantise_blocks(k, v, planes, torch.tensor([3, 1]))
    for bits, share in ((4, 0.5), (8, 1 / 16)):
        got_k, got_v = reference.dequantise(planes, bits)
        step_k = planes.k_step.float().repeat_interleave(BLOCK, 2)
        step_v = planes.v_step.float().flatten(2)[..., None]
        for got, expected, step in ((got_k, k, step_k), (got_v, v, step_v)):
            error = (got - expected).abs()
            assert (error <= share * step + 2e-6 * expected.abs().amax())[0].all()
            assert (error <= share * step + 2e-6 * expected.abs().amax())[1, :, :BLOCK].all()
            assert not got[1, :, BLOCK:].any()


@pytest.mark.corners
@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.slow), 128, 256])
def test_it_compiles_for_hopper_without_spills(split, dim):
    """Two programs fit on a multiprocessor (65536 registers), rows are read 16 bytes at a time, and only the
    divisions of the program's number convert."""
    pytest.importorskip("triton", reason="the kernels need triton")
    import aot

    from longtrain.kernels.hierarchical.quantise_kernel import CHANNELS, WARPS, quantise_kernel

    types = {name: "*fp16" for name in ("ks_ptr", "kz_ptr", "vs_ptr", "vz_ptr")}
    types |= {name: "*u8" for name in ("ku_ptr", "kl_ptr", "vu_ptr", "vl_ptr")}
    types |= {"k_ptr": "*bf16", "v_ptr": "*bf16", "first_ptr": "*i64", "count_ptr": "*i64"}
    constants = {"D": dim, "C": BLOCK, "RING": 0, "FLOOR": split is Split.FLOOR}
    constants["PARTS"] = dim // CHANNELS
    strides = [f"{x}_{name}" for x in "kv" for name in "lbgn"]
    warps = WARPS[split]
    built = aot.compile_kernel(quantise_kernel, types, constants, aligned=strides, warps=warps, stages=1)
    assert built.stack_bytes == 0 and built.registers * warps * 32 * 2 <= 65536
    assert built.count("LDG.E.128") and built.count("F2I") <= 4 and not built.count("LDG.E.U16")


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF, 6.02e4, -60001, 7e4, -7e4, 1e5, -1e5, 1e6, -1e6, 2e6])
def test_numbers_without_a_code_are_found(value):
    """Of two layers, in a block and in the ring; what lies beyond a sequence's rows does not count."""
    lens = Lens(torch.tensor([300, 140]), torch.tensor([1, 0]))
    for layer, old, spot in ((0, True, (0, 1, 77, 5)), (1, False, (0, 0, 130, 60)), (1, False, (1, 1, 3, 0))):
        for name in ("k", "v"):
            planes, ring = filled(lens, {})
            assert not hierarchical.unsound(planes, ring, lens).any()
            planes, ring = filled(lens, {(name, layer, old): (spot, value)})
            expected = torch.zeros(2, 2, dtype=torch.bool)
            expected[layer, int(name == "v")] = True
            assert torch.equal(hierarchical.unsound(planes, ring, lens), expected)
    planes, ring = filled(
        lens, {("k", 0, False): ((0, 1, 20, 5), value), ("v", 1, True): ((1, 0, 9, 9), value)}
    )
    assert not hierarchical.unsound(planes, ring, lens).any()


@pytest.mark.corners
@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("largest", [hierarchical.LARGEST, -hierarchical.LARGEST])
@pytest.mark.parametrize("others", ["usual", "equal", "opposite", "zero", "tiny", "odd"])
def test_numbers_up_to_the_bound_are_taken(split, largest, others):
    """Wherever the rest of the group lies; what is read back from the largest is a number of fp16."""
    planes, ring = planes_of(split), ring_of(1, 2, 2, 64)
    lens = Lens(torch.tensor([256, 256]), torch.ones(2, dtype=torch.int64))
    k, v = rows(2, 2, 128, 64, seed=7), rows(2, 2, 128, 64, seed=8)
    levels = {"equal": largest, "opposite": -largest, "zero": 0.0, "tiny": 1e-6, "odd": -12345.678}
    for x in (k, v):
        if others != "usual":
            x.fill_(levels[others])
        x[:, :, 17, 5] = largest
    hierarchical.quantise_blocks(k, v, planes.layer(0), torch.ones(2, dtype=torch.int64))
    assert not hierarchical.unsound(planes, ring, lens).any()
    assert all(x.half().isfinite().all() for x in reference.dequantise(planes.layer(0), 8))


def filled(lens, spoilt):
    """Planes and a ring after a prompt, with some values replaced before it was quantised."""
    planes, ring = planes_of(Split.FLOOR, layers=2), ring_of(2, 2, 2, 64)
    for layer in range(2):
        k, v = rows(2, 2, 128, 64, seed=7), rows(2, 2, 128, 64, seed=8)
        for (name, at, old), (spot, value) in spoilt.items():
            if at == layer:
                ((k if name == "k" else v) if old else getattr(ring, name)[layer])[spot] = value
        hierarchical.quantise_blocks(k, v, planes.layer(layer), torch.ones_like(lens.blocks_B))
    return planes, ring


def test_shapes_are_checked():
    planes = planes_of(Split.FLOOR).layer(0)
    with pytest.raises(DataError, match="head dim"):
        hierarchical.quantise_blocks(rows(2, 2, 128, 128), rows(2, 2, 128, 128), planes, torch.ones(2).long())
    for heads, groups, dim in ((8, 2, 96), (8, 3, 64), (8, 0, 64)):
        with pytest.raises(Exception, match="allowed"):
            check_shape(n_heads=heads, n_kv_heads=groups, head_dim=dim)


@pytest.mark.gpu
@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_compiled_kernel_gives_the_same_bytes(split, dim):
    """Bit for bit: the same operations in fp32, none of them fused."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        k, v = (strided(rows(2, 4, 1100, dim, seed=seed, dtype=dtype, device="cuda")) for seed in (3, 4))
        count_B = torch.tensor([8, 5], device="cuda")
        mine = planes_of(split, dim=dim, heads=4, blocks=9, device="cuda")
        expected = planes_of(split, dim=dim, heads=4, blocks=9, device="cuda")
        hierarchical.quantise_blocks(k, v, mine.layer(0), count_B)
        first_B = torch.zeros_like(count_B)
        reference.quantise_blocks(k[:, :, :1024], v[:, :, :1024], expected.layer(0), first_B, count_B)
        assert same(mine, expected) == []
        ring = ring_of(3, 2, 4, dim, dtype=dtype, device="cuda")
        block_B, due_B = torch.tensor([7, 3], device="cuda"), torch.tensor([True, False], device="cuda")
        mine, host = (
            planes_of(split, layers=3, dim=dim, heads=4, blocks=9, device=d) for d in ("cuda", "cpu")
        )
        hierarchical.flush_blocks(ring, mine, block_B, due_B)
        cpu = type(ring)(ring.k.cpu(), ring.v.cpu())
        hierarchical.flush_blocks(cpu, host, block_B.cpu(), due_B.cpu())
        assert all(torch.equal(getattr(mine, n).cpu(), getattr(host, n)) for n in ("k_upper", "v_lower"))
        assert int(mine.k_step.ne(0).sum()) == 3 * 4 * dim
