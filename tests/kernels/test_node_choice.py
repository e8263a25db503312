"""The choice of nodes: torch beside lists, the kernels compiled for capability 9.0 and on a GPU."""

import os
from dataclasses import replace

import pytest
import torch
from node_choice_cases import (
    SIZES,
    candidates,
    chains,
    moved,
    rates,
    same_as_torch,
    same_choices,
    tables_on,
    verdict,
)

from longtrain.errors import ConfigError
from longtrain.kernels.node_choice import choose, learn, reference

LARGE = [(11, 8, 13), (64, 14, 40), (100, 32, 60), (128, 8, 127)]
"""Nodes, copied tokens and chosen nodes of trees on a GPU."""


@pytest.mark.corners
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_choices_are_those_on_lists(case):
    nodes, copies, keep = case
    for seed in range(3):
        some, tables = candidates(12, nodes, copies, seed), rates(12, seed)
        assert same_choices(tables, some, keep, reference.choose(some, tables, keep)) > 8


@pytest.mark.parametrize("copies", [4, 20])
def test_copies_that_run_along_chains(copies):
    some, tables = chains(copies)
    for keep in (7, 18):
        assert same_choices(tables, some, keep, choose(some, tables, keep)) == 2


@pytest.mark.parametrize("keep", [0, -1, 8])
def test_more_nodes_than_there_are_and_none_are_refused(keep):
    some, tables = candidates(2, 5, 3, 0), rates(2, 0)
    with pytest.raises(ConfigError, match=rf"^keep={keep}; allowed: 1 to 7, the nodes and the copied tokens"):
        choose(some, tables, keep)
    assert choose(some, tables, 7)[0].shape == (2, 8)


def test_a_parent_comes_before_a_child_that_is_rounded_above_it():
    """The child's score lies in the better class; without its parent it would stand below the root."""
    some = candidates(1, 3, 1, 0)
    parents_BN = torch.tensor([[-1, 0, 1]])
    score_BN = torch.tensor([[0, -0.501, -0.499]])
    tokens_BN, copy_BK = torch.tensor([[7, 8, 9]]), torch.tensor([[6]])
    some = replace(some, tokens_BN=tokens_BN, parents_BN=parents_BN, depth_BN=torch.tensor([[0, 1, 2]]))
    some = replace(some, score_BN=score_BN, copy_BK=copy_BK, matched_B=torch.tensor([0]))
    tables = rates(1, 0)
    tables.copied_2BL[0] = 1e-3
    tables.drafted_2BQ[0] = tables.drafted_2BQ[1] * 0.5 ** torch.arange(1, 17)
    tokens, parents, *_ = choose(some, tables, 1)
    assert tokens.tolist() == [[7, 8]] and parents.tolist() == [[-1, 0]]


def test_an_impossible_node_counts_as_least_confident():
    some, tables = candidates(1, 2, 1, 0), rates(1, 0)
    some = replace(some, score_BN=torch.tensor([[0, -torch.inf]]))
    before = tables.drafted_2BQ[1].clone()
    zero_B1 = torch.zeros(1, 1).long()
    learn(some, tables, zero_B1, torch.zeros(1, 2).long(), zero_B1[0] + 1, zero_B1[0])
    assert (tables.drafted_2BQ[1] - before).nonzero().tolist() == [[0, 15]]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
@pytest.mark.parametrize(
    ("name", "places", "warps"),
    [
        ("_choose_kernel", 32, 1),
        ("_choose_kernel", 256, 8),
        ("_learn_kernel", 32, 1),
        ("_learn_kernel", 128, 4),
    ],
)
def test_kernels_compile_for_hopper_without_spills(name, places, warps):
    pytest.importorskip("triton")
    import aot

    from longtrain.kernels.node_choice import kernel as node_choice_triton

    jit = getattr(node_choice_triton, name)
    types = {arg: "*i64" for arg in jit.arg_names if arg.endswith("_ptr")}
    types |= {"score_ptr": "*fp32", "copied_ptr": "*fp32", "drafted_ptr": "*fp32", "step": "fp32"}
    copies = 32 if warps > 1 else 8
    constants = {"PLACES": places, "LEVELS": 7, "COPIES": copies, "LENGTHS": 16, "CLASSES": 16}
    if name == "_choose_kernel":
        constants["RIVALS"] = 32
    binary = aot.compile_kernel(jit, types, constants, warps=warps)
    assert binary.stack_bytes == 0 and binary.registers <= 168


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_on_a_gpu(case):
    same_as_torch("cuda", case, batch=24, seeds=4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_replays_of_a_graph(case):
    """Cycles of other candidates than those that were captured, with the tables of the cycles before."""
    nodes, copies, keep = case
    tables, there = rates(8, 0), moved(candidates(8, nodes, copies, 0), "cuda")
    mine = tables_on(tables, "cuda")
    path_BP = torch.zeros(8, copies + 1, dtype=torch.int64, device="cuda")
    n_B, next_B = torch.zeros(2, 8, dtype=torch.int64, device="cuda").unbind(0)

    def cycle():
        got = choose(there, mine, keep)
        learn(there, mine, got[0], path_BP, n_B, next_B)
        return got

    with torch.cuda.stream(torch.cuda.Stream()):
        cycle()  # without a valid node in the paths nothing is learned
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = cycle()
    for seed in range(1, 5):
        some = candidates(8, nodes, copies, seed)
        for name, tensor in vars(some).items():
            getattr(there, name).copy_(tensor)
        tree = reference.choose(some, tables, keep)
        judged = verdict(tree[0], tree[1], copies + 1, seed)
        for static, tensor in zip((path_BP, n_B, next_B), judged, strict=True):
            static.copy_(tensor)
        graph.replay()
        assert same_choices(tables, some, keep, tuple(x.cpu() for x in got)) > 4
        reference.learn(some, tables, got[0].cpu(), *judged)
        assert torch.equal(mine.copied_2BL.cpu(), tables.copied_2BL)
        assert torch.equal(mine.drafted_2BQ.cpu(), tables.drafted_2BQ)
