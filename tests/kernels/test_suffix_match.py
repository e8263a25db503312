"""The longest match: torch beside lists, the kernels compiled for capability 9.0 and on a GPU."""

import os

import pytest
import torch
from suffix_match_cases import texts_of

from longtrain.kernels.suffix_match import NONE, longest_match, write


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
    length_B, back_B, copy_BK = longest_match(tokens_BC, last_B, most, 5)
    texts = list(zip(tokens_BC.tolist(), last_B.tolist(), strict=True))
    expected = [by_comparing(tokens, last, most) for tokens, last in texts]
    assert list(zip(length_B.tolist(), back_B.tolist(), strict=True)) == expected
    assert max(length for length, _ in expected) == most
    for (tokens, last), (_, back), copy in zip(texts, expected, copy_BK.tolist(), strict=True):
        assert copy == [tokens[(last - back + 1 + step % back) % 64] for step in range(5)]


def test_what_is_written_goes_round():
    ring = torch.arange(16, dtype=torch.int32).view(2, 8)
    write(ring, torch.tensor([[21, 22, 23], [31, 32, 33]]), torch.tensor([14, 8]), torch.tensor([3, 1]))
    assert ring.tolist() == [[23, 1, 2, 3, 4, 5, 21, 22], [31, NONE, NONE, 11, 12, 13, 14, 15]]
    write(ring, torch.tensor([[41], [42]]), torch.tensor([3, 15]))
    assert ring.tolist() == [[23, 1, 2, 41, 4, 5, 21, 22], [31, NONE, NONE, 11, 12, 13, 14, 42]]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize(
    ("name", "constants", "warps"),
    [
        ("_scores_kernel", {"MOST": 64, "PLACES": 1024}, 4),
        ("_copy_kernel", {"BLOCKS": 128, "COPIES": 16}, 1),
        ("_write_kernel", {"WIDTH": 16, "CUT": True}, 1),
    ],
)
def test_kernels_compile_for_hopper_without_spills(name, constants, warps):
    pytest.importorskip("triton")
    import aot

    from longtrain.kernels.suffix_match import kernel as suffix_match_triton

    jit = getattr(suffix_match_triton, name)
    types = {arg: "*i64" for arg in jit.arg_names if arg.endswith("_ptr")}
    types["token_ptr"] = types["score_ptr"] = "*i32"
    if name == "_scores_kernel":
        types["out_ptr"] = "*i32"
    binary = aot.compile_kernel(jit, types, constants, aligned=["slots"], warps=warps)
    assert binary.stack_bytes == 0 and binary.registers <= 64


@pytest.mark.gpu
def test_on_a_gpu():
    for slots in (64, 8192):
        tokens_BC, last_B = texts_of(slots)
        there = tokens_BC.cuda()
        expected = longest_match(tokens_BC, last_B, 40, 9)
        got = longest_match(there, last_B.cuda(), 40, 9)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
        n_B = last_B % 10
        write(tokens_BC, expected[2], last_B + 1, n_B)
        write(there, got[2], last_B.cuda() + 1, n_B.cuda())
        assert torch.equal(there.cpu(), tokens_BC)
