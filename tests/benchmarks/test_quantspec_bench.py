"""`bench suite=quantspec` with a shape, on a CPU: laws of acceptance, and cells of a micro shape."""

import json
from functools import partial

import pytest
import torch

from benchmarks import acceptance_model as accept
from benchmarks import cycles
from benchmarks.cycles import CycleCounts
from benchmarks.speculation import CellRunner
from benchmarks.speculation_cells import FULL, RECORDED, CycleCell, CyclesSettings, cells_of
from longtrain import methods
from longtrain.assets import asset_dir
from longtrain.bench.suites import Context
from longtrain.costs import roofline
from longtrain.costs.cycle import Forward, expected_ms
from longtrain.costs.hardware import GPUS
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TokenTree, TreeShape, Verdict
from longtrain.errors import ConflictError, DataError
from longtrain.methods.policies.attention_free import StreamingLLM
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from tests.helpers import ONE_LAYER, attached

MICRO = ONE_LAYER
RUN = asset_dir("recipes") / RECORDED
CPU = Context(torch.device("cpu"))
FEW = CycleCounts(cycles=10, warmup=2, read=False)
INT8 = "INT8"


@pytest.fixture(scope="module")
def target():
    return random_target(MICRO, seed=3)


def longspec_cycle(size, widths, **keys):
    spec = methods.get("longspec")
    return spec.cost.cycle(spec.config(**keys), size, widths, 2).forwards


quantspec = partial(attached, "quantspec")


def test_independent_positions_give_a_geometric_law():
    children = accept.independent(0.9, 4)
    assert sum(children.probs) == pytest.approx(1) and len(children.probs) == 5
    assert children.tokens_per_cycle == pytest.approx((1 - 0.9**5) / (1 - 0.9))
    assert accept.independent(1.0, 3).probs == (0, 0, 0, 1)
    assert accept.independent(0.0, 3).probs == (1, 0, 0, 0)


@pytest.mark.parametrize("cycles", [8, 64])
def test_a_run_has_the_mean_of_its_law(cycles):
    """Every quantile once: no number is off by more than one cycle, and the seed orders them."""
    children = accept.independent(0.9, 4)
    lengths = children.lengths(cycles, seed=1)
    for k, prob in enumerate(children.probs):
        assert abs(lengths.count(k) - prob * cycles) <= 1
    assert sum(lengths) / cycles + 1 == pytest.approx(children.tokens_per_cycle, abs=4 / cycles)
    other = children.lengths(cycles, seed=2)
    assert sorted(other) == sorted(lengths) and other != lengths


def test_recorded_lengths_are_those_of_the_run():
    """The law's mean is the acceptance length that the run itself reports."""
    drafts = accept.recorded(RUN)
    for one, draft in zip(json.loads(RUN.read_text())["variants"], drafts, strict=True):
        for cell in one["lengths"]:
            children = draft.children(RUN, cell["length"] + 100)
            assert children.source["prompt_tokens"] == cell["length"]
            assert sum(children.probs) == pytest.approx(1) and min(children.probs) >= 0
            cycles = cell["by_depth"][0]["tried"]
            accepted = sum(level["accepted"] for level in cell["by_depth"])
            assert children.tokens_per_cycle == pytest.approx(1 + accepted / cycles)
    assert [draft.shape for draft in drafts] == [(1, 1, 1, 1), (4, 8, 8, 8)]
    assert drafts[0].children(RUN, 100).source["prompt_tokens"] == 2048


def test_results_of_the_harness_are_read_as_scores_are(tmp_path):
    """The same levels in either file give the same law; systems that draft nothing are passed over."""
    levels = [{"depth": 1, "tried": 8, "accepted": 6}, {"depth": 2, "tried": 6, "accepted": 3}]
    old, new = tmp_path / "scores.json", tmp_path / "results.json"
    lengths = [{"length": length, "by_depth": levels} for length in (128, 1536)]
    old.write_text(json.dumps({"variants": [{"name": "a", "shape": [1, 1], "lengths": lengths}]}))
    tasks = [{"task": name, "acceptance": {"tau": {}, "by_depth": levels}} for name in ("128", "1.5k")]
    plain = {"name": "full", "facts": {}, "tasks": [{"task": "128", "acceptance": None}]}
    new.write_text(
        json.dumps({"systems": [plain, {"name": "a", "facts": {"shape": [1, 1]}, "tasks": tasks}]})
    )
    assert accept.recorded(new) == accept.recorded(old)
    children = accept.recorded(new)[0].children(new, 2048)
    assert children.probs == (2 / 8, 3 / 8, 3 / 8) and children.source["prompt_tokens"] == 1536


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": None}, r"0\.lengths: Field required"),
        ({"levels": [(0, 0)]}, r"tried: Input should be greater than or equal to 1"),
        ({"levels": [(4, 5)]}, r"at length 9: of 4 tries \[5\] were accepted"),
        ({"levels": [(float("nan"), 2)]}, r"tried: Input should be a finite number"),
    ],
)
def test_damaged_scores_are_refused_in_one_line(tmp_path, changed, message):
    levels = [
        {"depth": i, "tried": t, "accepted": a} for i, (t, a) in enumerate(changed.get("levels", [(4, 2)]), 1)
    ]
    one = {"shape": [1], "name": "chain", "lengths": [{"length": 9, "by_depth": levels}], **changed}
    file = tmp_path / "scores.json"
    file.write_text(json.dumps({"variants": [{key: x for key, x in one.items() if x is not None}]}))
    with pytest.raises(DataError, match=message) as caught:
        accept.recorded(file)[0].children(file, 100)
    assert str(caught.value).startswith(f"suite.recorded={file} is not") and "\n" not in str(caught.value)


def test_replayed_paths_lead_from_the_root_to_the_last_level():
    shape = TreeShape((2, 3, 2))
    parents_BN = torch.tensor([[-1, 0, 0, 2, 1, 2, 5, 3]] * 2)
    tokens_BN = torch.arange(8).repeat(2, 1)
    tree = TokenTree(tokens_BN, parents_BN, torch.tensor([0, 1, 1, 2, 2, 2, 3, 3]))
    real = Verdict(
        torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, dtype=torch.int64), torch.tensor([5, 6])
    )
    judge = accept.GivenAcceptance([[3, 1], [2, 0]], shape, "cpu")
    first, second, third = (judge(tree, real, None) for _ in range(3))
    assert first.path_BP.tolist() == [[0, 2, 5, 6], [0, 2, 0, 0]] and first.n_B.tolist() == [4, 2]
    assert second.path_BP.tolist() == [[0, 2, 5, 0], [0, 0, 0, 0]] and second.n_B.tolist() == [3, 1]
    assert third.n_B.tolist() == first.n_B.tolist()
    assert torch.equal(first.next_B, real.next_B)
    capped = judge(tree, real, torch.tensor([2, 5]))
    assert capped.n_B.tolist() == [2, 1] and capped.path_BP[0].tolist() == [0, 2, 5, 0]


def runner(target, counts=FEW):
    """Runs cells on the target, as the suite does."""
    return CellRunner(target, counts, CPU)


def test_cycles_commit_what_the_law_says(target):
    """Chains over a plain cache: all tokens of the law, in every sequence; the cache has grown by as many."""
    children = accept.independent(0.5, 3)
    parts = attached("longspec", target, window=16)
    cell = CycleCell("a", FULL, 300, 2, shape=TreeShape((1, 1, 1)), children=children)
    phases = runner(target).ready(cell, parts)
    found = cycles.whole(phases, FEW)
    wanted = sum(sum(children.lengths(10, seed)) + 10 for seed in (0, 1000003)) / 20
    assert found["tokens_per_cycle"] == pytest.approx(wanted)
    warm = [children.lengths(10, seed)[-2:] for seed in (0, 1000003)]
    for row, length in enumerate(phases.cache.len_B.tolist()):
        lengths = children.lengths(10, (0, 1000003)[row])
        assert length == 300 + sum(lengths) + 10 + sum(warm[row]) + 2


def test_the_cap_of_strict_flushing_holds(target):
    """All drafts accepted: no cycle goes past the point where plain decoding quantises a block."""
    cell = CycleCell("a", INT8, 512, shape=TreeShape((1,) * 6), children=accept.independent(1.0, 6))
    phases = runner(target, CycleCounts(cycles=40, warmup=2, read=False)).ready(cell, quantspec(target))
    seen = []
    for _ in range(40):
        before = int(phases.cache.len_B)
        phases()
        seen.append((before, int(phases.cache.len_B)))
        assert phases.news_BX[0, :2].tolist() == [seen[-1][1] - before, 6]  # what is cut was accepted
        assert before // 128 == (seen[-1][1] - 1) // 128  # at most up to a multiple of 128
    assert {b - a for a, b in seen} >= {7} and any(b - a < 7 and b % 128 == 0 for a, b in seen)


@pytest.mark.parametrize("cache", [FULL, INT8])
def test_filled_caches_hold_what_was_read(target, cache):
    parts = quantspec(target, draft=False) if cache == INT8 else Parts()
    phases = runner(target, FEW).ready(CycleCell("plain", cache, 700, 2), parts)
    assert phases.cache.len_B.tolist() == [700, 700]
    if cache == INT8:
        assert phases.cache.blocks_B.tolist() == [700 // 128 - 1] * 2
    phases()
    assert phases.cache.len_B.tolist() == [701, 701]
    assert bool(torch.isfinite(phases.forward(phases.propose()).logits_BTV).all())


def test_cells_that_cannot_be_measured_say_why(target, monkeypatch):
    parts = quantspec(target).merge(Parts(evictor=StreamingLLM(Budget(64))))
    cell = CycleCell("a", INT8, 300, shape=TreeShape((1,)), children=accept.independent(0.9, 1))
    with pytest.raises(ConflictError, match=r"pass suite\.fill=prompt"):
        runner(target, FEW).ready(cell, parts)
    assert "chooses among rows" in runner(target).measure(cell, parts)["failed"]

    def full(*_args, **_keys):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(cycles, "fill", full)
    (row,) = runner(target).rows([CycleCell("plain", FULL, 300)])
    assert row["failed"].startswith("out of memory") and "speed" not in row


def test_a_prompt_may_be_read_instead(target):
    children = accept.independent(0.9, 2)
    cell = CycleCell("a", INT8, 300, split=True, shape=TreeShape((1, 1)), children=children)
    row = runner(target, CycleCounts(cycles=10, warmup=2)).measure(cell, quantspec(target))
    assert row["tokens_per_cycle"] == pytest.approx(children.tokens_per_cycle, abs=0.3)
    assert row["accepted"]["acceptance"] == 0.9 and row["steps"]["propose_ms"]["median"] > 0


def test_the_model_of_a_step_by_hand():
    """Bytes over shares of the bandwidth, 0.35 ms a forward; several drafts before a verification."""
    size = Sizes.of_keys(SHAPES["llama31_8b"])
    weights, kv = 7504658432, 2 * 32 * 8 * 128 * 32768
    plain = [Forward(Width())]
    at = {"batch": 1, "context": 32768}
    by_hand = 0.35 + 1e3 * (2 * weights / 0.87 + 2 * kv / 0.85) / 4.3e12
    assert expected_ms(plain, size, **at, bytes_per_s=4.3e12) == pytest.approx(by_hand, rel=2e-3)
    draft = 0.35 + 1e3 * (weights * (0.5 + 4 / 128) / 0.65 + kv * (0.5 + 4 / 128) / 0.75) / 4.3e12
    verify = 0.35 + 1e3 * (2 * weights / 0.87 + kv * (1 + 4 / 128) / 0.75) / 4.3e12
    cycle = [Forward(Width(4, 4), times=4), Forward(Width(kv=8), rows=5)]
    assert expected_ms(cycle, size, **at, bytes_per_s=4.3e12) == pytest.approx(4 * draft + verify, rel=5e-3)
    read = [one.phase(size, **at).whole.bytes for one in (plain[0], cycle[0])]
    assert read[0] == pytest.approx(2 * (weights + kv), rel=2e-3)
    assert read[1] == pytest.approx((0.5 + 4 / 128) * (weights + kv), rel=5e-3)
    least = [one.times * roofline.metrics(one.phase(size, **at), GPUS["H200"])["ms"] for one in cycle]
    assert sum(least) < expected_ms(cycle, size, **at, bytes_per_s=4.8e12)


@pytest.mark.parametrize(("head_bits", "head_bytes"), [(16, 2), (0, 0.53125), (4, 0.53125)])
def test_the_model_of_a_longspec_cycle_by_hand(head_bits, head_bytes):
    """A level reads one layer, the cross-attention's two products and the head, and one layer's cache."""
    size = Sizes.of_keys(SHAPES["llama31_8b"])
    layer, head = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336), 128256 * 4096
    level = (2 * (layer + 2 * 4096 * 4096) + head_bytes * head) / 0.87 + 2 * 2 * 8 * 128 * 32768 / 0.85
    at = {"batch": 1, "context": 32768, "bytes_per_s": 4.3e12}
    chain = expected_ms([*longspec_cycle(size, (1, 1), head_bits=head_bits)], size, **at)
    verify = expected_ms([Forward(Width(), rows=3)], size, **at)
    assert chain - verify == pytest.approx(2 * (0.35 / 32 + 1e3 * level / 4.3e12), rel=5e-3)
    assert [forward.rows for forward in longspec_cycle(size, (4, 8, 8))] == [1, 4, 8, 21]
    wide = longspec_cycle(size, (32, 32), head_bits=head_bits)[1]
    assert (wide.more_weights < 2 * 4096 * 4096) == (head_bits == 4), (
        "32 rows of a level read a copy if told to"
    )


def cells(**changes):
    """What a run of the micro shape measures."""
    keys = {"lengths": (300, 512), "systems": ("quantspec",), "drafted": (1, 2), "recorded": "auto"}
    keys |= {"shape": MICRO, "shape_systems": (), "recorded_systems": ("longspec",), **changes}
    return cells_of(CyclesSettings(**keys), CPU)


def test_cells_of_a_run():
    """Every length alone, the first one in batches and taken apart; caches grow, plain decoding is first."""
    found = cells(batches=(1, 2))
    places = [(300, 1), (512, 1), (300, 2)]
    wanted = [("plain, full cache", *place) for place in places]
    wanted += [(name, *place) for name in ("longspec 4", "longspec 4-8-8-8") for place in places]
    wanted += [("plain, INT8 cache", *place) for place in places]
    wanted += [(f"quantspec {n}", length, 1) for length in (300, 512) for n in (1, 2)]
    wanted += [("quantspec 2", 300, 2)]
    assert [(cell.name, cell.context, cell.batch) for cell in found] == wanted
    assert [cell.split for cell in found[-5:]] == [False, True, False, False, False]


def test_trained_methods_run_with_random_weights(target):
    """Also one that begins with hidden states: these are random, as the cache is."""
    small = {"name": "eagle3", "draft_vocab_size": 40, "layers": [0]}
    systems = ("longspec", {"method": small}, {"method": {**small, "window": 16}, "label": "a window"})
    found = cells(recorded=None, systems=systems, lengths=(300,), drafted=(2,))
    rows = [*runner(target).rows(found)]
    assert [row["system"] for row in rows][::3] == ["plain", "a window"] and len(rows) == 4
    assert all(row["speed"] > 0 for row in rows)
    assert rows[3]["draft_gib"] < rows[2]["draft_gib"]


@pytest.mark.slow
def test_the_suite_measures_a_shape(measured, tmp_path, capsys):
    shape = "suite.shape={" + ", ".join(f"{key}: {value}" for key, value in MICRO.items()) + "}"
    few = ("lengths=[300]", "suite.batches=[1,2]", "suite.warmup=2", "suite.cycles=4")
    rows = measured("quantspec", shape, *few)
    names = ("plain, full cache", "longspec 4", "longspec 4-8-8-8", "plain, INT8 cache", "quantspec 2")
    assert [(row["name"], row["batch"]) for row in rows] == [(name, n) for name in names for n in (1, 2)]
    assert all(row["speed"] > 0 for row in rows)
    assert all(("int8_speed" in row) is (row["cache"] == INT8) for row in rows)
    apart = [row for row in rows if "steps" in row]
    assert tuple(row["name"] for row in apart) == names
    assert {(row["prompt_tokens"], row["batch"]) for row in apart} == {(300, 1)}
    for name in ("speed", "steps", "batches"):
        assert (tmp_path / "bench" / f"quantspec_{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert "| quantspec 2 | 300 | 2 |" in capsys.readouterr().out
