"""Run by test_interpreted.py under TRITON_INTERPRET=1: the kernel of few rows, with its machine text."""

import pytest
import torch
import warp_emulator
from attention_cases import distance, hier_case, mask_named

from longtrain.kernels.hierarchical import fragments_launch as launch
from longtrain.kernels.hierarchical import reference
from longtrain.kernels.hierarchical.layout import Split

T = launch.FragmentTile
CASES = {
    "four bits": (4, Split.FLOOR, "causal", {"G": 2, "H": 8, "T": 2, "blocks": (3,), "recent": (200,)}, T()),
    "eight warps": (
        4,
        Split.RTN,
        "tree",
        {"B": 2, "G": 1, "H": 2, "T": 3, "blocks": (5, 0), "recent": (140, 3)},
        T(warps=8),
    ),
    "four bits, two tiles": (
        4,
        Split.RTN,
        "tree",
        {"G": 1, "H": 4, "T": 3, "blocks": (3,)},
        T(tiles=2),
    ),
    "eight bits": (8, Split.FLOOR, "none", {"G": 1, "H": 1, "T": 1, "blocks": (2,)}, T(warps=2)),
    "eight bits, two tiles": (
        8,
        Split.RTN,
        "tree",
        {"G": 1, "H": 4, "T": 4, "blocks": (6,)},
        T(tiles=2, warps=2),
    ),
    "eight bits, two parts, 21 rows": (
        8,
        Split.FLOOR,
        "tree",
        {"G": 1, "H": 3, "T": 7, "blocks": (3,), "recent": (200,)},
        T(tiles=2, parts=2, warps=4),
    ),
    "two parts of eight warps": (
        8,
        Split.RTN,
        "causal",
        {"B": 2, "G": 1, "H": 4, "T": 8, "blocks": (3, 0), "recent": (140, 3)},
        T(tiles=2, parts=2, warps=8),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_follows_the_reference(name, monkeypatch):
    """Of 3 splits one takes all blocks, round after round; 7 leave some without any."""
    warp_emulator.install(monkeypatch)
    bits, split, mask, case, tile = CASES[name]
    splits = 7 if "two tiles" in name else 3
    q, planes, ring, lens = hier_case(split=split, D=128, **case)
    q = q.half()
    how = {"bits": bits, "scale": q.shape[-1] ** -0.5}
    shown, _ = mask_named(mask, len(lens.len_B), q.shape[2])
    got, lse = launch.hier_attention(q, planes, ring, lens, shown, bits, how["scale"], tile, splits=splits)
    expected, expected_lse = reference.hier_attention(q.double(), planes, ring, lens, shown, **how)
    assert distance(got, expected) <= 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=0, check_dtype=False)
