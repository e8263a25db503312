"""Moves of rows: the kernel, interpreted, beside entries moved one by one."""

import pytest
import torch
from entry_move_cases import move_case, written_out

from longtrain.kernels.entry_moves import Programs, move_entries


@pytest.mark.parametrize("programs", [None, Programs(1, 64), Programs(5, 32), Programs(24, 128)])
@pytest.mark.parametrize("paged", ["", "goal", "source"])
def test_rows_are_moved(paged, programs):
    for seed, counted in ((0, True), (2, False)):
        goal, source, lists, pages = move_case(paged=paged, counted=counted, seed=seed)
        expected = written_out(goal, source, lists, pages)
        assert not torch.equal(goal, expected)
        move_entries(goal, source, lists, **pages, programs=programs)
        assert torch.equal(goal, expected)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("paged", ["", "goal", "source"])
def test_rows_of_parts_are_moved(paged, parts):
    goal, source, lists, pages = move_case(paged=paged, parts=parts)
    expected = written_out(goal, source, lists, pages)
    assert not torch.equal(goal, expected)
    move_entries(goal, source, lists, **pages, programs=Programs(5, 128))
    assert torch.equal(goal, expected)
