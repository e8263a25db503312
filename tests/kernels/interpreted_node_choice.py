"""The choice of nodes: the kernels, interpreted, beside torch and lists."""

from dataclasses import replace

import pytest
import torch
from node_choice_cases import SIZES, candidates, chains, rates, same_as_torch, tables_on, verdict

from longtrain.kernels import greedy
from longtrain.kernels.node_choice import choose, learn, reference


@pytest.fixture(autouse=True)
def _ancestors_in_torch(monkeypatch):
    """The reference's: otherwise they come from a kernel too, which is interpreted for most of the time."""
    monkeypatch.setattr(greedy, "runs_on", lambda device: False)


@pytest.mark.corners
@pytest.mark.parametrize("seeds", [2])
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_choices_and_tables_are_torchs(case, seeds):
    same_as_torch("cpu", case, batch=12, seeds=seeds)


@pytest.mark.parametrize("keep", [1, 9, 21])
def test_exact_ties_go_to_the_earlier_candidate(keep):
    """All is accepted, so all nodes that the copy runs through, and those behind it, are equally probable."""
    some, tables = candidates(6, 17, 8, 0), rates(6, 0)
    tables.copied_2BL[0] = tables.copied_2BL[1]
    tables.drafted_2BQ[:] = 7
    some = replace(some, score_BN=torch.zeros_like(some.score_BN))
    expected = reference.choose(some, tables, keep)
    assert all(torch.equal(a, b) for a, b in zip(choose(some, tables, keep), expected, strict=True))


@pytest.mark.parametrize("copies", [4, 20])
def test_chains_that_copies_run_along(copies):
    some, tables = chains(copies)
    for keep in (7, 18):
        expected = reference.choose(some, tables, keep)
        assert all(torch.equal(a, b) for a, b in zip(choose(some, tables, keep), expected, strict=True))
    path_BP = torch.zeros(2, copies + 1).long()
    judged = expected[0], path_BP, torch.full((2,), copies + 1), torch.zeros(2).long()
    both = [tables_on(tables, "cpu") for _ in range(2)]
    learn(some, both[0], *judged)
    reference.learn(some, both[1], *judged)
    assert torch.equal(both[0].copied_2BL, both[1].copied_2BL)
    assert torch.equal(both[0].drafted_2BQ, both[1].drafted_2BQ)


def test_tensors_may_be_views():
    """Depths that are one row for all sequences, and every second element of others."""
    some, tables = candidates(5, 11, 6, 3), rates(5, 3)
    row = {name: getattr(some, name)[2:3].expand(5, -1) for name in ("parents_BN", "depth_BN")}
    plain = replace(some, **{name: tensor.contiguous() for name, tensor in row.items()})

    def spread(tensor):
        return tensor.repeat_interleave(2, -1)[..., ::2]

    others = {name: spread(getattr(some, name)) for name in ("tokens_BN", "score_BN", "copy_BK", "matched_B")}
    views = replace(some, **row, **others)
    expected, got = (choose(one, tables, 9) for one in (plain, views))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    path_BP, n_B, next_B = verdict(got[0], got[1], 7, 0)
    both = [tables_on(tables, "cpu") for _ in range(2)]
    for judged in ((n_B, next_B), (n_B.clamp(max=1), plain.copy_BK[:, 0])):
        learn(plain, both[0], got[0], path_BP, *judged)
        learn(views, both[1], spread(got[0]), spread(path_BP), *map(spread, judged))
    assert torch.equal(both[0].copied_2BL, both[1].copied_2BL)
    assert torch.equal(both[0].drafted_2BQ, both[1].drafted_2BQ)
