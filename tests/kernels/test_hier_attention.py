from itertools import product

import pytest
import torch
from attention_cases import distance, hier_case, mask_named

from longtrain.errors import ConfigError, DataError
from longtrain.kernels.hierarchical import hier_attention, reference
from longtrain.kernels.hierarchical.layout import Lens, Split
from longtrain.kernels.hierarchical.reference import dequantise
from longtrain.kernels.tree_attention import CAUSAL, tree_bits


@pytest.mark.corners
@pytest.mark.parametrize("mask", ["none", "causal", "tree"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("split", list(Split))
def test_the_reference_follows_the_definition(split, bits, mask):
    """Row by row over the written-out planes and the ring's positions, in fp64."""
    T, blocks, recent = 4, (2, 0), (200, 3)
    q, planes, ring, lens = hier_case(split=split, B=2, T=T, blocks=blocks, recent=recent)
    shown, visible_BTT = mask_named(mask, 2, T)
    out, lse = hier_attention(q.double(), planes, ring, lens, shown, bits=bits, scale=0.125)
    k, v = (x.double() for x in dequantise(planes, bits))
    for b in range(2):
        old, end = 128 * blocks[b], 128 * blocks[b] + recent[b]
        for h in range(4):
            for t in range(T):
                fresh = [*range(old, end)] + [end + j for j in range(T) if visible_BTT[b, t, j]]
                slots = [p % 384 for p in fresh]
                keys = torch.cat((k[b, h // 2, :old], ring.k[b, h // 2, slots].double()))
                values = torch.cat((v[b, h // 2, :old], ring.v[b, h // 2, slots].double()))
                logit = 0.125 * keys @ q[b, h, t].double()
                torch.testing.assert_close(lse[b, h, t], torch.logsumexp(logit, 0))
                torch.testing.assert_close(out[b, h, t], torch.softmax(logit, 0) @ values)


def test_bad_shapes_are_refused():
    q, planes, ring, lens = hier_case(split=Split.FLOOR)
    with pytest.raises(DataError, match="bits=2; allowed: 4, 8"):
        hier_attention(q, planes, ring, lens, CAUSAL, bits=2, scale=1.0)
    with pytest.raises(DataError, match="multiple of KV heads"):
        hier_attention(q[:, :3], planes, ring, lens, CAUSAL, bits=4, scale=1.0)
    with pytest.raises(DataError, match="1 to 128 tokens"):
        hier_attention(q.repeat(1, 1, 50, 1), planes, ring, lens, CAUSAL, bits=4, scale=1.0)
    with pytest.raises(DataError, match="tree mask"):
        hier_attention(
            q, planes, ring, lens, tree_bits(torch.ones(1, 5, 5, dtype=torch.bool)), bits=4, scale=1.0
        )


def test_a_tile_that_cannot_be_served_is_refused():
    """Else the general kernel would be timed under its name."""
    pytest.importorskip("triton", reason="the kernels need triton")
    from longtrain.kernels.hierarchical import attention_launch as launch
    from longtrain.kernels.hierarchical import fragments_launch as fragments

    for D, H, bits in ((128, 2, 4), (64, 2, 4), (128, 16, 8)):
        q, planes, ring, lens = hier_case(split=Split.FLOOR, D=D, H=H, T=2, dtype=torch.bfloat16)
        allowed = rf"head dim {D}, {bits} bits.* on cpu; allowed: head dim 128"
        with pytest.raises(ConfigError, match=allowed):
            launch.hier_attention(q, planes, ring, lens, CAUSAL, bits, 1.0, fragments.FragmentTile(tiles=2))
    for wrong in ({"tiles": 1, "parts": 2}, {"tiles": 2, "parts": 2, "warps": 2}):
        with pytest.raises(ConfigError, match=r"parts=2.*; allowed: two tiles where there are two parts"):
            fragments.FragmentTile(**wrong)


def test_tiles_for_any_number_of_rows_split_the_keys_alike():
    """Else a row's bits depend on how many there are: splits, and the blocks that a warp takes in turn."""
    pytest.importorskip("triton", reason="the kernels need triton")
    from longtrain.kernels.hierarchical import fragments_launch as fragments

    for bits, group, programs in product((4, 8), range(1, 9), (1, 8, 16, 64)):
        counts = [M for M in range(group, 65, group) if fragments.takes(M, bits, group, 128, torch.bfloat16)]
        tiles = [fragments.tile_for(M, bits, group, programs) for M in counts]
        assert len({(one.warps // one.parts, one.resident) for one in tiles}) <= 1
        assert all(one.rows >= M for M, one in zip(counts, tiles, strict=True))
        if bits == 8 and group <= 4:
            assert counts[-1] >= 8 * group


@pytest.mark.parametrize("bits", [4, 8])
def test_only_tiles_that_run_are_offered(bits):
    """Each once, and not the chosen one, which is timed anyway."""
    pytest.importorskip("triton", reason="the kernels need triton")
    from longtrain.kernels.hierarchical import attention_launch as launch
    from longtrain.kernels.hierarchical import fragments_launch as fragments

    bf16 = torch.bfloat16
    for group, rows, D, dtype, few in (
        (1, 1, 128, bf16, True),
        (2, 8, 128, torch.float16, True),
        (2, 16, 128, bf16, True),
        (4, 4, 128, bf16, True),
        (4, 28, 128, bf16, bits == 8),
        (8, 8, 128, bf16, bits == 4),
        (2, 8, 64, bf16, False),
        (2, 8, 128, torch.float32, False),
        (2, 18, 128, bf16, False),
    ):
        found = launch.candidates(rows, bits, group, D, dtype)
        assert any(not isinstance(tile, launch.BlockTile) for tile in found) is few
        assert len(set(found)) == len(found) >= 4
        if few:
            assert fragments.tile_for(rows, bits, group, 1) not in found
        assert all(rows <= tile.rows for tile in found if not isinstance(tile, launch.BlockTile))


@pytest.mark.gpu
def test_a_tile_for_fewer_rows_is_refused():
    from longtrain.kernels.hierarchical import attention_launch as launch
    from longtrain.kernels.hierarchical import fragments_launch as fragments

    q, planes, ring, lens = hier_case(split=Split.FLOOR, D=128, H=8, T=3, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ConfigError, match="12 packed rows"):
        launch.hier_attention(q, planes, ring, lens, CAUSAL, 4, 1.0, fragments.FragmentTile())


GPU_CASES = [
    {"T": 1, "H": 8, "blocks": (5,), "recent": (130,)},
    {"T": 2, "H": 2, "B": 2, "blocks": (37, 0), "recent": (256, 3)},
    {"T": 4, "H": 8, "blocks": (300,), "recent": (250,)},
    {"T": 7, "H": 8, "B": 2, "blocks": (40, 37), "recent": (256, 3)},
    {"T": 64, "H": 2, "B": 2, "blocks": (3, 0), "recent": (200, 0)},
    {"T": 3, "H": 8, "G": 1, "blocks": (0,), "recent": (70,)},
    {"T": 64, "H": 8, "blocks": (33,), "recent": (128,)},
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("split", "bits", "D"),
    [
        *[(Split.FLOOR, 4, 128), (Split.FLOOR, 8, 128), (Split.RTN, 4, 64), (Split.RTN, 8, 128)],
        *[(Split.FLOOR, 4, 256), (Split.FLOOR, 8, 256)],
    ],
    ids=str,
)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernels_on_a_gpu(case, split, bits, D):
    """bf16 rounds the ring's weights to 8 bits; queries times steps and the planes' weights are fp16."""
    q, planes, ring, lens = hier_case(**case, split=split, D=D, dtype=torch.bfloat16, device="cuda")
    for name in ("causal", "tree") if case["T"] > 1 else ("none",):
        mask, _ = mask_named(name, len(lens.len_B), q.shape[2], "cuda")
        how = {"bits": bits, "scale": D**-0.5}
        out, lse = hier_attention(q, planes, ring, lens, mask, **how)
        expected, expected_lse = reference.hier_attention(q.double(), planes, ring, lens, mask, **how)
        assert distance(out, expected) <= 4e-3
        group = q.shape[1] // planes.k_upper.shape[1]
        few = D == 128 and group * q.shape[2] <= (16 if bits == 4 else 32)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3 if few else 3e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "H", "most", "D"),
    [*((*one, 128) for one in [(4, 8, 4), (8, 2, 8), (8, 4, 8), (8, 6, 8), (8, 8, 8)]), (8, 8, 8, 256)],
)
def test_a_row_does_not_depend_on_how_many_there_are(bits, H, most, D):
    q, planes, ring, lens = hier_case(
        split=Split.FLOOR,
        H=H,
        T=most,
        D=D,
        blocks=(77,),
        recent=(200,),
        dtype=torch.bfloat16,
        device="cuda",
    )
    how = {"bits": bits, "scale": D**-0.5}
    ring.k.nan_to_num_()
    ring.v.nan_to_num_()
    alone = [
        hier_attention(q[:, :, t : t + 1], planes, ring, Lens(lens.len_B + t, lens.blocks_B), CAUSAL, **how)
        for t in range(most)
    ]
    for T in range(1, most + 1):
        out, lse = hier_attention(q[:, :, :T], planes, ring, lens, CAUSAL, **how)
        for t, (one, one_lse) in enumerate(alone[:T]):
            assert torch.equal(out[:, :, t], one[:, :, 0]) and torch.equal(lse[..., t], one_lse[..., 0])


@pytest.mark.gpu
def test_one_captured_graph_serves_every_length():
    q, planes, ring, lens = hier_case(
        split=Split.FLOOR, H=8, T=5, D=128, blocks=(20,), recent=(300,), dtype=torch.bfloat16, device="cuda"
    )
    ring.k.nan_to_num_()
    ring.v.nan_to_num_()
    how = {"bits": 4, "scale": 128**-0.5}
    hier_attention(q, planes, ring, lens, CAUSAL, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = hier_attention(q, planes, ring, lens, CAUSAL, **how)
    for blocks, recent in ((0, 0), (1, 130), (20, 255)):
        lens.blocks_B.fill_(blocks)
        lens.len_B.fill_(128 * blocks + recent)
        graph.replay()
        expected, expected_lse = reference.hier_attention(q.double(), planes, ring, lens, CAUSAL, **how)
        assert distance(out, expected) <= 4e-3
        torch.testing.assert_close(lse.double(), expected_lse, atol=3e-3, rtol=0)
