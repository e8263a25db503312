"""Run by test_interpreted.py under TRITON_INTERPRET=1: the Triton kernels on a CPU against their twin."""

import warnings

import pytest
import torch
from attention_cases import distance, hier_case, mask_named

from longtrain.kernels.hierarchical import hier_attention, kernel_serves, reference
from longtrain.kernels.hierarchical.layout import Split

CASES = {
    "four bits, a full ring": (4, Split.FLOOR, "tree", {"G": 1, "blocks": (3,), "recent": (381,)}),
    "the paper's split": (4, Split.RTN, "causal", {"G": 1, "T": 1}),
    "eight bits, head dim 128": (8, Split.FLOOR, "causal", {"G": 1, "D": 128, "T": 5}),
    "heads of 256": (4, Split.RTN, "tree", {"H": 4, "G": 1, "D": 256, "T": 5}),
    "eight bits, heads of 256": (8, Split.FLOOR, "causal", {"H": 4, "G": 1, "D": 256, "T": 2}),
    "eight bits of the paper's split": (8, Split.RTN, "none", {"G": 1, "T": 2, "recent": (384 - 2,)}),
    "no block, no token": (4, Split.FLOOR, "causal", {"G": 1, "blocks": (0,), "recent": (0,), "T": 2}),
    "ragged batch": (4, Split.FLOOR, "tree", {"B": 2, "H": 2, "blocks": (2, 0), "recent": (5, 130)}),
    "more rows than a tile": (8, Split.FLOOR, "tree", {"H": 1, "G": 1, "T": 35, "blocks": (1,)}),
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():  # log2(0) of splits that have no block
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.mark.parametrize(("bits", "split", "mask", "case"), CASES.values(), ids=CASES)
def test_the_kernel_follows_the_reference(bits, split, mask, case):
    """Queries times steps are rounded to fp16 (11 bits); scores here are sums of 64 such, up to about 10."""
    q, planes, ring, lens = hier_case(split=split, **case)
    how = {"bits": bits, "scale": q.shape[-1] ** -0.5}
    shown, _ = mask_named(mask, len(lens.len_B), q.shape[2])
    assert kernel_serves(q, planes, ring)
    got, lse = hier_attention(q, planes, ring, lens, shown, **how)
    expected, expected_lse = reference.hier_attention(q.double(), planes, ring, lens, shown, **how)
    assert distance(got, expected) <= 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=0, check_dtype=False)


def test_large_steps_and_zeros_do_not_overflow():
    """A key channel of range 15 * 30 about 300, values of step 100: q s is far above 65504 unless scaled."""
    q, planes, ring, lens = hier_case(split=Split.FLOOR, G=1, T=1, blocks=(2,), recent=(3,))
    planes.k_step[..., 7] *= 100
    planes.k_zero[..., 7] += 300
    planes.v_step.mul_(300)
    q = q * 1000
    q[..., 7] *= 1e-4
    got, lse = hier_attention(q, planes, ring, lens, None, bits=4, scale=0.01)
    expected, expected_lse = reference.hier_attention(
        q.double(), planes, ring, lens, None, bits=4, scale=0.01
    )
    assert torch.isfinite(got).all() and distance(got, expected) <= 2e-2
    torch.testing.assert_close(lse, expected_lse, atol=0.05, rtol=0, check_dtype=False)
