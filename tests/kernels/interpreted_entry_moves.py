"""Moves of rows: the kernel, interpreted, beside entries moved one by one."""

import pytest
import torch
from entry_move_cases import move_case, written_out

from longtrain.kernels.entry_moves import Programs, move_entries


@pytest.mark.corners
@pytest.mark.parametrize("programs", [None, Programs(1, 256), Programs(5, 512), Programs(24, 256)])
@pytest.mark.parametrize("paged", ["", "goal", "source"])
def test_rows_are_moved(paged, programs):
    """One program for all, an odd number of them, and two for each layer, sequence and KV head."""
    for seed, counted in ((0, True), (2, False))[: 1 if programs else 2]:
        goal, source, lists, pages = move_case(paged=paged, counted=counted, seed=seed)
        expected = written_out(goal, source, lists, pages)
        assert not torch.equal(goal, expected)
        move_entries(goal, source, lists, **pages, programs=programs)
        assert torch.equal(goal, expected)


@pytest.mark.parametrize("paged", ["", "goal", "source"])
def test_rows_of_parts_are_moved(paged):
    """In one case a program may move fewer numbers at once than a row has: it moves a row."""
    goal, source, lists, pages = move_case(paged=paged, parts=3)
    expected = written_out(goal, source, lists, pages)
    assert not torch.equal(goal, expected)
    move_entries(goal, source, lists, **pages, programs=Programs(5, 64 if paged == "goal" else 512))
    assert torch.equal(goal, expected)
