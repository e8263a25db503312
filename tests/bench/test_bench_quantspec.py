"""`bench suite=quantspec` on a CPU: laws of acceptance, cells of a micro shape, a micro target on text."""

import json

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from longtrain import cli, methods
from longtrain.assets import asset_dir
from longtrain.bench import quantspec_accept as accept
from longtrain.bench import quantspec_report, quantspec_shape, quantspec_staging, quantspec_text, steps
from longtrain.bench.quantspec_cells import FULL, INT8, Cell, Group, Settings, Way, name_of
from longtrain.costs.cycle import Forward, bound_ms, bytes_read, expected_ms, longspec
from longtrain.costs.hardware import GPUS
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.decoding.roles import Parts, TokenTree, TreeShape, Verdict
from longtrain.errors import ConfigError, ConflictError, DataError
from longtrain.jobs import bench, bench_quantspec
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import Want

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
RECORDED = asset_dir("recipes") / bench_quantspec.RECORDED
FEW = Settings(cycles=10, warmup=2)


@pytest.fixture(scope="module")
def target():
    return random_target(MICRO, seed=3)


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
    with pytest.raises(ConfigError, match=r"suite.acceptance=1.2; allowed: 0 to 1"):
        accept.independent(1.2, 3)


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
    for one in json.loads(RECORDED.read_text())["variants"]:
        shape = TreeShape(tuple(one["shape"]))
        for cell in one["lengths"]:
            law = accept.recorded(RECORDED, shape, cell["length"] + 100)
            assert law.source["prompt_tokens"] == cell["length"]
            assert sum(law.probs) == pytest.approx(1) and min(law.probs) >= 0
            cycles = cell["by_depth"][0]["tried"]
            accepted = sum(level["accepted"] for level in cell["by_depth"])
            assert law.tokens_per_cycle == pytest.approx(1 + accepted / cycles)
    shapes = [shape.widths for shape in accept.shapes_recorded(RECORDED)]
    assert shapes == [(1, 1, 1, 1), (4, 8, 8, 8)]
    assert accept.recorded(RECORDED, TreeShape((1, 1, 1, 1)), 100).source["prompt_tokens"] == 2048


def test_what_is_not_recorded_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no drafts of shape \[2, 2\]; it has: \[1, 1, 1, 1\]"):
        accept.recorded(RECORDED, TreeShape((2, 2)), 2048)
    other = tmp_path / "other.json"
    other.write_text('{"rows": []}')
    for read in (lambda: accept.recorded(other, TreeShape((1,)), 1), lambda: accept.shapes_recorded(other)):
        with pytest.raises(DataError, match=r"not a scores\.json of eval suite=acceptance"):
            read()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": None}, r"no entry 'lengths'"),
        ({"name": None}, r"no entry 'name'"),
        ({"lengths": []}, r"no lengths; allowed: one or more"),
        ({"lengths": 5}, r"not iterable"),
        ({"lengths": [{"by_depth": []}]}, r"no entry 'length'"),
        ({"lengths": [{"length": 9}]}, r"no entry 'by_depth'"),
        ({"lengths": [{"length": 9, "by_depth": []}]}, r"an empty by_depth at length 9"),
        ({"levels": [(0, 0)]}, r"tried 0 and accepted \[0\] by depth at length 9; allowed: tried above 0"),
        ({"levels": [(4, 5)]}, r"tried 4 and accepted \[5\]"),
        ({"levels": [(4, 2), (2, 3)]}, r"tried 4 and accepted \[2, 3\]"),
        ({"levels": [("4", 2)]}, r"unsupported operand"),
        ({"levels": [(float("nan"), 2)]}, r"tried nan"),
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
        accept.recorded(file, TreeShape((1,)), 100)
    assert str(caught.value).startswith(f"suite.recorded={file} is not") and "\n" not in str(caught.value)


def test_replayed_paths_lead_from_the_root_to_the_last_level():
    shape = TreeShape((2, 3, 2))
    parents_BN = torch.tensor([[-1, 0, 0, 2, 1, 2, 5, 3]] * 2)
    tokens_BN = torch.arange(8).repeat(2, 1)
    tree = TokenTree(tokens_BN, parents_BN, torch.tensor([0, 1, 1, 2, 2, 2, 3, 3]))
    real = Verdict(
        torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, dtype=torch.int64), torch.tensor([5, 6])
    )
    judge = accept.Replay([[3, 1], [2, 0]], shape, "cpu")
    first, second, third = (judge(tree, real, None) for _ in range(3))
    assert first.path_BP.tolist() == [[0, 2, 5, 6], [0, 2, 0, 0]] and first.n_B.tolist() == [4, 2]
    assert second.path_BP.tolist() == [[0, 2, 5, 0], [0, 0, 0, 0]] and second.n_B.tolist() == [3, 1]
    assert third.n_B.tolist() == first.n_B.tolist()
    assert torch.equal(first.next_B, real.next_B)
    capped = judge(tree, real, torch.tensor([2, 5]))
    assert capped.n_B.tolist() == [2, 1] and capped.path_BP[0].tolist() == [0, 2, 0, 0]


def test_cycles_commit_what_the_law_says(target):
    """Chains over a plain cache: all tokens of the law, in every sequence; the cache has grown by as many."""
    law = accept.independent(0.5, 3)
    module = methods.get("longspec")
    config = module.config(window=16)
    parts = module.attach(module.build(config, target.info), target, config, {})
    cell = Cell(Way("longspec", FULL, TreeShape((1, 1, 1)), law), 300, batch=2)
    phases = quantspec_staging.staged(target, parts, cell, FEW)
    found = steps.whole(phases, quantspec_staging.steps_of(cell.way, FEW))
    wanted = sum(sum(law.lengths(10, seed)) + 10 for seed in (0, 1000003)) / 20
    assert found["tokens_per_cycle"] == pytest.approx(wanted)
    warm = [law.lengths(10, seed)[-2:] for seed in (0, 1000003)]
    for row, length in enumerate(phases.cache.len_B.tolist()):
        lengths = law.lengths(10, (0, 1000003)[row])
        assert length == 300 + sum(lengths) + 10 + sum(warm[row]) + 2


def test_the_cap_of_strict_flushing_holds(target):
    """All drafts accepted: no cycle goes past the point where plain decoding quantises a block."""
    cell = Cell(Way("quantspec", INT8, TreeShape((1,) * 6), accept.independent(1.0, 6)), 512)
    phases = quantspec_staging.staged(target, quantspec(target), cell, Settings(cycles=40, warmup=2))
    seen = []
    for _ in range(40):
        before = int(phases.cache.len_B)
        phases()
        seen.append((before, int(phases.cache.len_B)))
        assert before // 128 == (seen[-1][1] - 1) // 128  # at most up to a multiple of 128
    assert {b - a for a, b in seen} >= {7} and any(b - a < 7 and b % 128 == 0 for a, b in seen)


@pytest.mark.parametrize("cache", [FULL, INT8])
def test_filled_caches_hold_what_was_read(target, cache):
    parts = quantspec(target, draft=False) if cache == INT8 else Parts()
    phases = quantspec_staging.staged(target, parts, Cell(Way("plain", cache), 700, 2), FEW)
    assert phases.cache.len_B.tolist() == [700, 700]
    if cache == INT8:
        assert phases.cache.blocks_B.tolist() == [700 // 128 - 1] * 2
    phases()
    assert phases.cache.len_B.tolist() == [701, 701]
    assert bool(torch.isfinite(phases.forward(phases.propose()).logits_BTV).all())


def test_cells_that_cannot_be_measured_say_why(target, monkeypatch):
    parts = quantspec(target)
    parts.draft.want = Want(hidden=(0,))
    cell = Cell(Way("quantspec", INT8, TreeShape((1,)), accept.independent(0.9, 1)), 300)
    with pytest.raises(ConflictError, match=r"pass suite\.fill=prompt"):
        quantspec_staging.staged(target, parts, cell, FEW)
    assert "hidden states" in quantspec_shape.measure(target, parts, cell, FEW)["failed"]

    def full(*_args, **_keys):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(quantspec_staging, "fill", full)
    rows = quantspec_shape.run(target, [Group(lambda _: Parts(), (Cell(Way("plain", FULL), 300),))], FEW)
    assert [row["failed"] for row in rows] == ["out of memory"] and "speed" not in rows[0]


def test_a_prompt_may_be_read_instead(target):
    law = accept.independent(0.9, 2)
    cell = Cell(Way("quantspec", INT8, TreeShape((1, 1)), law), 300, split=True)
    row = quantspec_shape.measure(target, quantspec(target), cell, Settings(10, 2, fill="prompt"))
    assert row["tokens_per_cycle"] == pytest.approx(law.tokens_per_cycle, abs=0.3)
    assert row["accepted"]["acceptance"] == 0.9 and row["steps"]["propose_ms"]["median"] > 0
    for wrong in ({"fill": "zeros"}, {"warmup": 1}, {"cycles": 0}):
        with pytest.raises(ConfigError, match="allowed"):
            Settings(**wrong)


@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv"])
def test_sparse_drafts_see_random_rows_too(target, policy):
    spec = methods.get("magicdec")
    config = spec.config(policy=policy)
    parts = spec.attach(spec.build(config, target.info), target, config, {})
    cell = Cell(Way("sparse", FULL, TreeShape((1, 1)), accept.independent(0.9, 2)), 1024, batch=2)
    row = quantspec_shape.measure(target, parts, cell, FEW)
    assert "failed" not in row and row["tokens_per_cycle"] > 2
    assert 0.2 < row["draft_gib"] / row["cache_gib"] < 0.4  # a quarter of the rows, and room


def test_kernels_can_be_compiled_beforehand(target):
    """All cells run once, side by side; one that cannot is left to the measurement."""
    ran = []

    def attach(one):
        ran.append(one)
        return quantspec(one)

    good = Cell(Way("quantspec", INT8, TreeShape((1, 1)), accept.independent(0.9, 2)), 300)
    bad = Cell(Way("quantspec", INT8, TreeShape((2,)), accept.independent(0.9, 1)), 300)
    quantspec_shape.compile_all(target, [Group(attach, (good, bad))], FEW, threads=2)
    assert len(ran) == 2


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


def test_the_model_of_a_longspec_cycle_by_hand():
    """A level reads one layer, the cross-attention's two products and the head, and one layer's cache."""
    size = Sizes.of_keys(SHAPES["llama31_8b"])
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    level = 2 * (layer + 2 * 4096 * 4096 + 128256 * 4096) / 0.87 + 2 * 2 * 8 * 128 * 32768 / 0.85
    at = {"batch": 1, "context": 32768, "bytes_per_s": 4.3e12}
    chain = expected_ms([*longspec(size, (1, 1))], size, **at)
    verify = expected_ms([Forward(Width(), rows=3)], size, **at)
    assert chain - verify == pytest.approx(2 * (0.35 / 32 + 1e3 * level / 4.3e12), rel=5e-3)
    assert [forward.rows for forward in longspec(size, (4, 8, 8))] == [1, 4, 8, 21]


def test_rows_are_compared_with_plain_decoding_of_their_kind():
    def row(system, cache, speed, context=1024, batch=1):
        return {
            "system": system, "cache": cache, "prompt_tokens": context, "batch": batch, "cache_gib": 2.0,
            "tokens_per_s": speed,
        }  # fmt: skip

    rows = [row("plain", FULL, 10.0), row("plain", INT8, 8.0), row("quantspec", INT8, 16.0)]
    rows += [row("longspec", FULL, 20.0), row("quantspec", INT8, 5.0, batch=2)]
    rows += [{"system": "x", "cache": FULL, "prompt_tokens": 1024, "batch": 1, "failed": "out of memory"}]
    quantspec_shape.compare(rows)
    assert all("expected_speed" not in one for one in rows)
    assert [one.get("speed") for one in rows] == [1.0, 0.8, 1.6, 2.0, None, None]
    assert [one.get("int8_speed") for one in rows] == [None, 1.0, 2.0, None, None, None]


@pytest.fixture
def composed(tmp_path):
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):

        def make(*overrides):
            common = ["suite=quantspec", f"run_dir={tmp_path}", "suite.warmup=2", "suite.cycles=4"]
            return compose("bench", overrides=[*common, *overrides])

        yield make


def micro_words():
    return "suite.shape={" + ", ".join(f"{key}: {value}" for key, value in MICRO.items()) + "}"


def test_cells_of_a_run(composed):
    """Every length alone, the first one in batches and taken apart; caches grow, plain decoding is first."""
    cfg = composed(micro_words(), "lengths=[512,300]", "suite.batches=[1,2]", "suite.drafted=[1,2]")
    groups = bench_quantspec._groups(cfg, torch.device("cpu"), Sizes.of_keys(MICRO))
    cells = [[(name_of(c.way), c.context, c.batch) for c in group.cells] for group in groups]
    places = [(300, 1), (512, 1), (300, 2)]
    assert cells[0] == [("plain, full cache", *place) for place in places]
    assert cells[1:3] == [[(name, 300, 1), (name, 300, 2)] for name in ("longspec 4", "longspec 4-8-8-8")]
    assert cells[3] == [("plain, INT8 cache", *place) for place in places]
    alone = [(f"quantspec {n}", length, 1) for length in (300, 512) for n in (1, 2)]
    assert cells[4] == [*alone, ("quantspec 2", 300, 2)]
    assert [c.split for c in groups[4].cells] == [False, True, False, False, False]
    own = "{method: prompt_lookup, label: look-up, acceptance: 0.4, drafted: [3]}"
    words = f"suite.systems=[{{method: quantspec, drafted: [1]}},{own}]"
    cfg = composed(micro_words(), "lengths=[300]", "suite.recorded=null", "suite.batches=[2]", words)
    groups = bench_quantspec._groups(cfg, torch.device("cpu"), Sizes.of_keys(MICRO))
    assert [len(group.cells) for group in groups] == [2, 2, 2, 1]
    way = groups[3].cells[0].way
    assert (way.system, way.cache, way.law) == ("look-up", FULL, accept.independent(0.4, 3))


def test_the_suite_measures_a_shape(composed, tmp_path, capsys):
    bench.run(composed(micro_words(), "lengths=[300]", "suite.batches=[1,2]"))
    rows = json.loads((tmp_path / "bench" / "quantspec.json").read_text())["rows"]
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


def test_the_suite_measures_a_target_on_text(composed, tmp_path, monkeypatch):
    """A micro target with the bundled tokenizer: what decodes on one cache gives one text."""
    from longtrain.targets.loading import load_target

    tokenizer = load_target("tiny").tokenizer
    micro = random_target({**MICRO, "vocab_size": 4096}, seed=1, dtype=torch.float64)
    micro.tokenizer = tokenizer
    monkeypatch.setattr(bench_quantspec, "load_target_from", lambda cfg: micro)
    half = "{method: {name: quantspec, weight_bits: 16}, label: KV, drafted: [3]}"
    words = f"suite.systems=[{{method: quantspec}},{half}]"
    bench.run(composed("lengths=[300,400]", "suite.max_new_tokens=12", "suite.prompts=2", words))
    rows = json.loads((tmp_path / "bench" / "quantspec.json").read_text())["rows"]
    assert [(row["system"], row["prompt_tokens"], row["drafted"]) for row in rows] == [
        ("plain", 300, 0), ("plain", 400, 0),
        ("quantspec", 300, 0), ("quantspec", 300, 2), ("quantspec", 400, 0), ("quantspec", 400, 2),
        ("KV", 300, 0), ("KV", 300, 3), ("KV", 400, 0), ("KV", 400, 3),
    ]  # fmt: skip
    for row in rows:
        if row["drafted"]:
            assert row["same_texts"] == 1.0 and row["same_cache_speed"] > 0
            assert 0 <= row["acceptance_rate"] <= 1
            assert 1 <= row["tokens_per_cycle"] <= row["drafted"] + 1
            assert row["by_depth"][0]["tried"] > 0
    assert (tmp_path / "bench" / "quantspec_contexts.png").is_file()


def test_a_system_out_of_memory_is_a_row(target):
    def attach(_target):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    systems = [quantspec_text.System("large", attach, (1,))]
    rows = quantspec_text.run(target, systems, {8: [[3, 4, 5, 6, 7, 8, 9, 10]]}, quantspec_text.Settings(4))
    assert [row.get("failed") for row in rows] == [None, "out of memory"]
    assert quantspec_report.text_pictures(rows) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["suite.shape=gpt5"], "suite.shape=gpt5; known: llama_micro"),
        ([micro_words(), "suite.systems=[snapkv]"], r"suite.systems entry snapkv; allowed: \{method: NAME\}"),
        ([micro_words(), "suite.systems=[{method: longspec}]"], "method longspec, which is trained"),
        ([micro_words(), "suite.systems=[{method: {name: quantspec, bits: 3}}]"], "unknown key"),
        (
            [micro_words(), "suite.systems=[{method: quantspec},{method: quantspec}]"],
            "two systems named quantspec",
        ),
        ([micro_words(), "suite.drafted=[0]"], r"suite.drafted=\[0\]; allowed"),
        ([micro_words(), "suite.acceptance=2"], r"suite.acceptance=2.0; allowed: 0 to 1"),
        ([micro_words(), "suite.memory_gib=8", "target.device=cpu"], "suite.memory_gib=8 on a cpu"),
    ],
)
def test_wrong_keys_are_told(composed, words, message):
    with pytest.raises(ConfigError, match=message):
        bench.run(composed("lengths=[300]", *words))
