"""Run by test_interpreted.py under TRITON_INTERPRET=1: the kernel's bytes are the twin's."""

import pytest
import torch
from hier_cases import planes_of, ring_of, rows, same, strided

from longtrain.kernels import hierarchical
from longtrain.kernels.hierarchical import reference
from longtrain.kernels.hierarchical.layout import Lens, Split

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("split", "dim", "dtypes"),
    [
        (Split.FLOOR, 64, DTYPES),
        (Split.RTN, 64, DTYPES[1:2]),
        (Split.RTN, 128, DTYPES[:1]),
        (Split.FLOOR, 256, DTYPES[:1]),
    ],
)
def test_prompts(split, dim, dtypes):
    for dtype in dtypes:
        k, v = (strided(rows(2, 2, 300, dim, seed=seed, dtype=dtype)) for seed in (3, 4))
        v[0, 1, 7] = 0  # a token of nothing
        count_B = torch.tensor([2, 1])
        mine, expected = planes_of(split, dim=dim), planes_of(split, dim=dim)
        assert hierarchical.kernels_serve(k)
        hierarchical.quantise_blocks(k, v, mine.layer(0), count_B)
        first_B = torch.zeros_like(count_B)
        reference.quantise_blocks(k[:, :, :256], v[:, :, :256], expected.layer(0), first_B, count_B)
        assert same(mine, expected) == []
        assert not mine.k_step[0, 1, :, 1:].any() and mine.k_step[0, 0, :, 1].all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -7e4])
def test_values_without_a_code_mark_their_group(value):
    """One look at steps and zeros finds them, as in the twin; the other blocks are as they were."""
    k, v = rows(1, 1, 256, 64, seed=3), rows(1, 1, 256, 64, seed=4)
    k[0, 0, 90, 40], v[0, 0, 17, 5] = value, value
    count_B = torch.tensor([2])
    mine, expected = planes_of(Split.FLOOR, batch=1, heads=1), planes_of(Split.FLOOR, batch=1, heads=1)
    hierarchical.quantise_blocks(k, v, mine.layer(0), count_B)
    reference.quantise_blocks(k, v, expected.layer(0), torch.zeros_like(count_B), count_B)
    for step, zero, at in (("k_step", "k_zero", 40), ("v_step", "v_zero", 17)):
        for planes in (mine, expected):
            marked = ~(getattr(planes, step) + getattr(planes, zero)).isfinite()
            assert marked[0, 0, 0, 0, at] and not marked[0, 0, 0, 1].any()
        assert torch.equal(getattr(mine, step)[0, 0, 0, 1], getattr(expected, step)[0, 0, 0, 1])


@pytest.mark.parametrize("split", Split)
def test_numbers_beyond_the_bound_are_found(split):
    """Of either sign, in the kernel's steps and zeros; one at the bound is none of them."""
    ring, lens = ring_of(1, 1, 1, 64), Lens(torch.tensor([256]), torch.tensor([1]))
    for value, bad in ((6e4, False), (7e4, True), (1e6, True)):
        for signed in (value, -value):
            k, v = rows(1, 1, 128, 64, seed=3), rows(1, 1, 128, 64, seed=4)
            k[0, 0, 90, 40], v[0, 0, 17, 5] = signed, signed
            planes = planes_of(split, batch=1, heads=1)
            hierarchical.quantise_blocks(k, v, planes.layer(0), torch.tensor([1]))
            assert hierarchical.unsound(planes, ring, lens).tolist() == [[bad, bad]]


def test_flush():
    ring = ring_of(2, 3, 1, 64)
    block_B, due_B = torch.tensor([0, 1, 2]), torch.tensor([True, False, True])
    mine = planes_of(Split.FLOOR, layers=2, batch=3, heads=1)
    hierarchical.flush_blocks(ring, mine, block_B, due_B)
    expected = planes_of(Split.FLOOR, layers=2, batch=3, heads=1)
    for layer in range(2):
        for b, block in ((0, 0), (2, 2)):
            k, v = (x[layer][:, :, 128 * block : 128 * block + 128] for x in (ring.k, ring.v))
            one_B = torch.zeros(3, dtype=torch.int64)
            one_B[b] = 1
            reference.quantise_blocks(k, v, expected.layer(layer), one_B * block, one_B)
    assert same(mine, expected) == []
