"""Run by test_interpreted.py under TRITON_INTERPRET=1: the kernel of four warps, with its machine text."""

import pytest
import torch
from attention_cases import distance, hier_case, mask_named
from interpreted_hier_fragments import emulated
from triton.runtime.interpreter import InterpreterBuilder

from longtrain.kernels.hierarchical import cooperative_launch as launch
from longtrain.kernels.hierarchical import reference
from longtrain.kernels.hierarchical.layout import Split

CASES = {
    "four tiles": (Split.FLOOR, "tree", {"G": 1, "H": 4, "T": 7, "blocks": (3,), "recent": (200,)}, 4),
    "two tiles of a batch": (
        Split.RTN,
        "tree",
        {"B": 2, "G": 1, "H": 4, "T": 3, "blocks": (3, 0), "recent": (140, 3)},
        2,
    ),
    "one row": (Split.FLOOR, "none", {"G": 2, "H": 8, "T": 1, "blocks": (2,)}, 1),
}


@pytest.mark.parametrize(("split", "mask", "case", "tiles"), CASES.values(), ids=CASES)
def test_the_kernel_follows_the_reference(split, mask, case, tiles, monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", emulated, raising=False)
    q, planes, ring, lens = hier_case(split=split, D=128, **case)
    q = q.half()
    scale = q.shape[-1] ** -0.5
    shown, _ = mask_named(mask, len(lens.len_B), q.shape[2])
    tile = launch.CooperativeTile(tiles=tiles)
    got, lse = launch.hier_attention(q, planes, ring, lens, shown, 8, scale, tile, splits=6)
    want, want_lse = reference.hier_attention(q.double(), planes, ring, lens, shown, bits=8, scale=scale)
    assert distance(got, want) <= 1e-3
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=0, check_dtype=False)
