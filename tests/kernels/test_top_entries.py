"""The choice of rows: the twin beside a sort, the kernels compiled for capability 9.0 and on a GPU."""

import os

import pytest
import torch
from top_entries_cases import KINDS, SINKS, WINDOW, K, scores_of

from longtrain.errors import DataError
from longtrain.kernels.top_entries import choose_entries, reference


def by_sorting(scores_S, n, sinks, window, rows):
    """The set of one sequence by a sort of its rows."""
    most = torch.finfo(torch.float32).max
    score = scores_S.nan_to_num(-most).clamp(-most, most).tolist()
    forced = [s for s in range(n) if s < sinks or s >= n - window]
    others = sorted(set(range(n)) - {*forced}, key=lambda s: (-score[s], -s))
    found = sorted((forced + others)[:rows])
    return found + [0] * (rows - len(found))


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_sorts(kind):
    len_B, out = torch.tensor([90, K, 3]), torch.full((3, 2, K), -1)
    scores = scores_of(kind, 3, 2, 101)
    choose_entries(scores, len_B, out, sinks=SINKS, window=WINDOW, due_B=torch.tensor([True, True, False]))
    for b, n in enumerate([90, K]):
        for x in range(2):
            assert out[b, x].tolist() == by_sorting(scores[b, x], n, SINKS, WINDOW, K)
    assert (out[2] == -1).all()


def test_sizes_that_do_not_go_together():
    scores, len_B = torch.zeros(2, 1, 30), torch.tensor([30, 3])
    with pytest.raises(DataError, match="one number of sets"):
        choose_entries(scores, len_B, torch.zeros(2, 2, K), sinks=0, window=0)
    with pytest.raises(DataError, match=r"10 first and 10 last entries of 20; allowed: fewer"):
        choose_entries(scores, len_B, torch.zeros(2, 1, K), sinks=10, window=10)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
def test_the_kernels_compile_for_hopper_without_spills():
    """At 128K slots; where scores lie side by side they are loaded 16 bytes a thread."""
    pytest.importorskip("triton")
    import aot

    from longtrain.kernels.top_entries import kernel as top_entries_triton
    from longtrain.kernels.top_entries.kernel import TILE

    sizes = {"DUE": True, "CHAINED": True, "BLOCK": TILE.block}
    kernels = (
        (top_entries_triton.peaks_kernel, {"GROUPS": TILE.groups, "COLUMNS": TILE.columns, "TILE": 32}),
        (top_entries_triton.reach_kernel, {"GROUPS": TILE.groups}),
        (top_entries_triton.choose_kernel, {"CHUNKS": 32, "SPAN": 256, "FEW": 2048}),
    )
    for (jit, more), warps in zip(kernels, TILE.warps, strict=True):
        types = {arg: "*i32" for arg in jit.arg_names if arg.endswith("_ptr")}
        types |= {"score_ptr": "*fp32", "len_ptr": "*i64", "due_ptr": "*u8", "out_ptr": "*i64"}
        types |= {"peak_ptr": "*u32"}
        constants = {name: value for name, value in (sizes | more).items() if name in jit.arg_names}
        binary = aot.compile_kernel(jit, types, constants, aligned=("score_b", "score_x", "S"), warps=warps)
        assert binary.stack_bytes == 0
        assert binary.registers * 32 * warps <= 65536  # a program has the registers of one multiprocessor
        assert binary.count("LDG.E.128") or jit is top_entries_triton.choose_kernel


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_on_a_gpu(kind):
    """The twin's sets, to the row: short and long texts, budgets of a few rows and of thousands."""
    for slots, rows in ((301, K), (5000, 1024), (40001, 2048), (140000, 1024)):
        lens = torch.tensor([slots, slots // 3, rows + 1, rows, 5]).cuda()
        scores = scores_of(kind, 5, 3, slots).cuda()
        due_B = torch.tensor([True, True, True, True, False]).cuda()
        own, other = torch.full((2, 5, 3, rows), -1, device="cuda").unbind(0)
        choose_entries(scores, lens, own, sinks=SINKS, window=WINDOW, due_B=due_B)
        reference.choose_entries(scores, lens, other, SINKS, WINDOW, due_B)
        assert torch.equal(own, other)
