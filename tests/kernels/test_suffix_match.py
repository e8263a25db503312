"""The longest match: torch beside lists, the kernel compiled for capability 9.0 and on a GPU."""

import os

import pytest
import torch
from suffix_match_cases import texts_of

from longtrain.kernels.suffix_match import NONE, longest_match


def by_comparing(tokens: list[int], last: int, most: int) -> tuple[int, int]:
    """The longest match of a ring buffer's text, place by place, the latest first."""
    slots, best, found = len(tokens), 0, 1
    for back in range(1, slots):
        agree = 0
        while agree < most and back + agree < slots:
            token, end = tokens[(last - back - agree) % slots], tokens[(last - agree) % slots]
            if token == NONE or token != end:
                break
            agree += 1
        if agree > best:
            best, found = agree, back
    return best, found


@pytest.mark.parametrize("most", [1, 3, 40, 62])
def test_the_longest_match_and_the_latest(most):
    tokens_BC, last_B = texts_of(64)
    length_B, back_B = longest_match(tokens_BC, last_B, most)
    pairs = zip(tokens_BC.tolist(), last_B.tolist(), strict=True)
    expected = [by_comparing(tokens, last, most) for tokens, last in pairs]
    assert list(zip(length_B.tolist(), back_B.tolist(), strict=True)) == expected
    assert max(length for length, _ in expected) == most


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
def test_the_kernel_compiles_for_hopper_without_spills():
    pytest.importorskip("triton")
    import aot

    from longtrain.kernels.suffix_match.kernel import _scores_kernel

    types = {"token_ptr": "*i32", "last_ptr": "*i64", "out_ptr": "*i32", "slots": "i32"}
    binary = aot.compile_kernel(
        _scores_kernel, types, {"MOST": 64, "PLACES": 1024}, aligned=["slots"], warps=4
    )
    assert binary.stack_bytes == 0 and binary.registers <= 64


@pytest.mark.gpu
def test_on_a_gpu():
    for slots in (64, 8192):
        tokens_BC, last_B = texts_of(slots)
        expected = longest_match(tokens_BC, last_B, 40)
        got = longest_match(tokens_BC.cuda(), last_B.cuda(), 40)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
