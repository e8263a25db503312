"""`bench suite=quantspec` with a shape, on a CPU: laws of acceptance, and cells of a micro shape."""

import json

import pytest
import torch

from benchmarks import acceptance_law as accept
from benchmarks.speculation import CellRunner, compare
from benchmarks.speculation_cells import FULL, RECORDED, CycleCell, CyclesSettings, cells_of
from longtrain import methods
from longtrain.assets import asset_dir
from longtrain.bench import cycles
from longtrain.bench.cycles import CycleCounts
from longtrain.bench.suites import Context
from longtrain.costs.cycle import Forward, bound_ms, bytes_read, expected_ms
from longtrain.costs.hardware import GPUS
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TokenTree, TreeShape, Verdict
from longtrain.errors import ConflictError, DataError
from longtrain.methods.policies.attention_free import StreamingLLM
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES

MICRO = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
RUN = asset_dir("recipes") / RECORDED
CPU = Context(torch.device("cpu"))
FEW = CycleCounts(cycles=10, warmup=2, read=False)
INT8 = "INT8"
OTHER_SUITE = json.dumps(
    {
        "systems": [
            {
                "name": "a",
                "facts": {"shape": [1]},
                "tasks": [{"task": "qasper", "acceptance": {"by_depth": []}}],
            }
        ]
    }
)


@pytest.fixture(scope="module")
def target():
    return random_target(MICRO, seed=3)


def longspec_cycle(size, widths, **keys):
    spec = methods.get("longspec")
    return spec.cost.cycle(spec.config(**keys), size, widths, 2).forwards


def quantspec(target, **keys) -> Parts:
    spec = methods.get("quantspec")
    config = spec.config(**keys)
    return spec.attach(spec.build(config, target.info), target, config, {})


def test_independent_positions_give_a_geometric_law():
    law = accept.independent(0.9, 4)
    assert sum(law.probs) == pytest.approx(1) and len(law.probs) == 5
    assert law.tokens_per_cycle == pytest.approx((1 - 0.9**5) / (1 - 0.9))
    assert accept.independent(1.0, 3).probs == (0, 0, 0, 1)
    assert accept.independent(0.0, 3).probs == (1, 0, 0, 0)


@pytest.mark.parametrize("cycles", [8, 64])
def test_a_run_has_the_mean_of_its_law(cycles):
    """Every quantile once: no number is off by more than one cycle, and the seed orders them."""
    law = accept.independent(0.9, 4)
    lengths = law.lengths(cycles, seed=1)
    for k, prob in enumerate(law.probs):
        assert abs(lengths.count(k) - prob * cycles) <= 1
    assert sum(lengths) / cycles + 1 == pytest.approx(law.tokens_per_cycle, abs=4 / cycles)
    other = law.lengths(cycles, seed=2)
    assert sorted(other) == sorted(lengths) and other != lengths


def test_recorded_lengths_are_those_of_the_run():
    """The law's mean is the acceptance length that the run itself reports."""
    drafts = accept.recorded(RUN)
    for one, draft in zip(json.loads(RUN.read_text())["variants"], drafts, strict=True):
        for cell in one["lengths"]:
            law = draft.law(RUN, cell["length"] + 100)
            assert law.source["prompt_tokens"] == cell["length"]
            assert sum(law.probs) == pytest.approx(1) and min(law.probs) >= 0
            cycles = cell["by_depth"][0]["tried"]
            accepted = sum(level["accepted"] for level in cell["by_depth"])
            assert law.tokens_per_cycle == pytest.approx(1 + accepted / cycles)
    assert [draft.shape for draft in drafts] == [(1, 1, 1, 1), (4, 8, 8, 8)]
    assert drafts[0].law(RUN, 100).source["prompt_tokens"] == 2048


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
    law = accept.recorded(new)[0].law(new, 2048)
    assert law.probs == (2 / 8, 3 / 8, 3 / 8) and law.source["prompt_tokens"] == 1536


@pytest.mark.parametrize(
    "text", ['{"rows": []}', '{"variants": [{}]}', "[]", "no JSON", '{"variants": 3}', OTHER_SUITE]
)
def test_what_is_not_a_run_is_refused(tmp_path, text):
    other = tmp_path / "other.json"
    other.write_text(text)
    with pytest.raises(DataError, match=r"not a results\.json of eval suite=acceptance") as caught:
        accept.recorded(other)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"not a results\.json of eval suite=acceptance"):
        accept.recorded(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": None}, r"0\.lengths: Field required"),
        ({"name": None}, r"0\.name: Field required"),
        ({"lengths": []}, r"at least 1 item"),
        ({"lengths": 5}, r"0\.lengths: Input should be"),
        ({"lengths": [{"by_depth": []}]}, r"0\.lengths\.0\.length: Field required"),
        ({"lengths": [{"length": 9}]}, r"by_depth: Field required"),
        ({"lengths": [{"length": 9, "by_depth": []}]}, r"by_depth: Tuple should have at least 1 item"),
        ({"levels": [(0, 0)]}, r"tried: Input should be greater than or equal to 1"),
        ({"levels": [(4, 5)]}, r"at length 9: of 4 tries \[5\] were accepted"),
        ({"levels": [(4, 2), (2, 3)]}, r"of 4 tries \[2, 3\]"),
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
        accept.recorded(file)[0].law(file, 100)
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
    law = accept.independent(0.5, 3)
    module = methods.get("longspec")
    config = module.config(window=16)
    parts = module.attach(module.build(config, target.info), target, config, {})
    cell = CycleCell("a", FULL, 300, 2, shape=TreeShape((1, 1, 1)), law=law)
    phases = runner(target).ready(cell, parts)
    found = cycles.whole(phases, FEW)
    wanted = sum(sum(law.lengths(10, seed)) + 10 for seed in (0, 1000003)) / 20
    assert found["tokens_per_cycle"] == pytest.approx(wanted)
    warm = [law.lengths(10, seed)[-2:] for seed in (0, 1000003)]
    for row, length in enumerate(phases.cache.len_B.tolist()):
        lengths = law.lengths(10, (0, 1000003)[row])
        assert length == 300 + sum(lengths) + 10 + sum(warm[row]) + 2


def test_the_cap_of_strict_flushing_holds(target):
    """All drafts accepted: no cycle goes past the point where plain decoding quantises a block."""
    cell = CycleCell("a", INT8, 512, shape=TreeShape((1,) * 6), law=accept.independent(1.0, 6))
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
    cell = CycleCell("a", INT8, 300, shape=TreeShape((1,)), law=accept.independent(0.9, 1))
    with pytest.raises(ConflictError, match=r"pass suite\.fill=prompt"):
        runner(target, FEW).ready(cell, parts)
    assert "chooses among rows" in runner(target).measure(cell, parts)["failed"]

    def full(*_args, **_keys):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(cycles, "fill", full)
    (row,) = runner(target).rows([CycleCell("plain", FULL, 300)])
    assert row["failed"].startswith("out of memory") and "speed" not in row


def test_a_prompt_may_be_read_instead(target):
    law = accept.independent(0.9, 2)
    cell = CycleCell("a", INT8, 300, split=True, shape=TreeShape((1, 1)), law=law)
    row = runner(target, CycleCounts(cycles=10, warmup=2)).measure(cell, quantspec(target))
    assert row["tokens_per_cycle"] == pytest.approx(law.tokens_per_cycle, abs=0.3)
    assert row["accepted"]["acceptance"] == 0.9 and row["steps"]["propose_ms"]["median"] > 0


@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv"])
def test_sparse_drafts_see_random_rows_too(target, policy):
    spec = methods.get("magicdec")
    config = spec.config(policy=policy)
    parts = spec.attach(spec.build(config, target.info), target, config, {})
    cell = CycleCell("a", FULL, 1024, 2, shape=TreeShape((1, 1)), law=accept.independent(0.9, 2))
    row = runner(target).measure(cell, parts)
    assert "failed" not in row and row["tokens_per_cycle"] > 2
    assert 0.2 < row["draft_gib"] / row["cache_gib"] < 0.4  # a quarter of the rows, and room


def test_kernels_can_be_compiled_beforehand(target, monkeypatch):
    """All cells run once, side by side; one that cannot is left to the measurement."""
    ran = []

    def brought(one, cell):
        ran.append(cell)
        return quantspec(one.target)

    monkeypatch.setattr(CellRunner, "parts", brought)
    good = CycleCell("a", INT8, 300, shape=TreeShape((1, 1)), law=accept.independent(0.9, 2))
    bad = CycleCell("a", INT8, 300, shape=TreeShape((2,)), law=accept.independent(0.9, 1))
    runner(target).compile([good, bad], threads=2)
    assert sorted(ran, key=lambda cell: cell.shape.widths) == [good, bad]


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
    assert bytes_read(plain, size, **at) == pytest.approx(2 * (weights + kv), rel=2e-3)
    assert bytes_read(cycle[:1], size, **at) == pytest.approx(4 * (0.5 + 4 / 128) * (weights + kv), rel=5e-3)
    least = bound_ms(cycle, size, GPUS["H200"], **at)
    assert least < expected_ms(cycle, size, **at, bytes_per_s=4.8e12)
    assert least == pytest.approx(
        4 * bound_ms(cycle[:1], size, GPUS["H200"], **at) / 4 + bound_ms(cycle[1:], size, GPUS["H200"], **at)
    )


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


def test_rows_are_compared_with_plain_decoding_of_their_kind():
    def row(system, cache, speed, context=1024, batch=1):
        return {
            "system": system, "cache": cache, "prompt_tokens": context, "batch": batch, "cache_gib": 2.0,
            "tokens_per_s": speed,
        }  # fmt: skip

    rows = [row("plain", FULL, 10.0), row("plain", INT8, 8.0), row("quantspec", INT8, 16.0)]
    rows += [row("longspec", FULL, 20.0), row("quantspec", INT8, 5.0, batch=2)]
    rows += [{"system": "x", "cache": FULL, "prompt_tokens": 1024, "batch": 1, "failed": "out of memory"}]
    compare(rows)
    assert all("expected_speed" not in one for one in rows)
    assert [one.get("speed") for one in rows] == [1.0, 0.8, 1.6, 2.0, None, None]
    assert [one.get("int8_speed") for one in rows] == [None, 1.0, 2.0, None, None, None]


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


def test_systems_have_their_own_drafts_and_acceptance():
    own = {"method": "prompt_lookup", "label": "look-up", "acceptance": 0.4, "drafted": [3]}
    systems = ({"method": "quantspec", "drafted": [1]}, own)
    found = cells(lengths=(300,), recorded=None, batches=(2,), systems=systems)
    assert [cell.system for cell in found] == ["plain"] * 4 + ["quantspec"] * 2 + ["look-up"]
    assert (found[-1].cache, found[-1].law) == (FULL, accept.independent(0.4, 3))


def test_trained_methods_run_with_random_weights(target):
    """Also one that begins with hidden states: these are random, as the cache is."""
    small = {"name": "eagle3", "draft_vocab_size": 40, "layers": [0]}
    systems = ("longspec", {"method": small}, {"method": {**small, "window": 16}, "label": "a window"})
    found = cells(recorded=None, systems=systems, lengths=(300,), drafted=(2,))
    rows = [*runner(target).rows(found)]
    assert [row["system"] for row in rows][::3] == ["plain", "a window"] and len(rows) == 4
    assert all(row["speed"] > 0 for row in rows)
    assert rows[3]["draft_gib"] < rows[2]["draft_gib"]


def test_an_entry_repeats_the_recorded_drafts_that_bear_its_name(tmp_path):
    levels = [{"depth": 1, "tried": 8, "accepted": 6}]
    lengths = [{"length": length, "by_depth": levels} for length in (128, 512)]
    levels_of_other = [{"depth": 1, "tried": 8, "accepted": 2}]
    other = [{"length": 128, "by_depth": levels_of_other}]
    file = tmp_path / "scores.json"
    variants = [("main chain 1", lengths), ("other chain 1", other)]
    file.write_text(
        json.dumps({"variants": [{"name": n, "shape": [1], "lengths": of} for n, of in variants]})
    )
    named = ({"method": "longspec", "label": "main"}, {"method": "longspec", "label": "other"})
    found = cells(recorded=str(file), recorded_systems=named, systems=())
    drafting = [cell for cell in found if cell.system != "plain"]
    assert [(cell.system, cell.context) for cell in drafting] == [
        (name, length) for name in ("main", "other") for length in (300, 512)
    ]
    assert [cell.law.source["prompt_tokens"] for cell in drafting] == [128, 512, 128, 128]
    assert [cell.law.tokens_per_cycle for cell in drafting] == [1.75, 1.75, 1.25, 1.25]


def test_a_cache_alone_is_the_system_without_its_draft(target):
    plain = [cell for cell in cells(recorded=None) if cell.system == "plain"]
    assert [cell.cache for cell in plain] == [FULL, FULL, INT8, INT8]
    parts = runner(target).parts(plain[-1])
    assert parts.cache is not None and parts.draft is None


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
