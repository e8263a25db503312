from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from longtrain import files, methods, tables
from longtrain.decoding.roles import Law, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.stats import Cycle, Stats
from longtrain.errors import ConfigError
from longtrain.evaluation import report
from longtrain.evaluation.acceptance import Cell, Protocol, Runs, Variant, check
from longtrain.evaluation.contexts import Document, Point, choose_points
from longtrain.evaluation.exactness import compare
from longtrain.evaluation.figures.acceptance import acceptance_of
from longtrain.evaluation.figures.statistics import Bootstrap
from longtrain.evaluation.harness.plan import plan
from longtrain.evaluation.harness.run import Runner
from longtrain.evaluation.records import Record
from longtrain.evaluation.scores import scores
from longtrain.evaluation.speed import measure_speed
from longtrain.evaluation.suites.continuation import runs_of, suite_of
from longtrain.methods.longspec.config import Config
from longtrain.systems import FULL_CACHE, System
from longtrain.targets.loading import random_target

CHAIN, TREE = TreeShape((1, 1, 1)), TreeShape((2, 3, 3))


@pytest.fixture(scope="module")
def target():
    made = random_target("llama_micro", seed=0)
    made.tokenizer = Digits()
    return made


class Digits:
    """Enough of a tokenizer for the harness to keep texts."""

    chat_template = None

    def decode(self, ids, *, skip_special_tokens):
        return " ".join(map(str, ids))


def run_acceptance(target, variants, protocol):
    """Every unit of the suite with plain decoding and with every variant, in this process."""
    systems = [FULL_CACHE] if protocol.compare else []
    for way in variants:
        same = protocol.compare and (protocol.sampling.greedy or way.shape.law is Law.POINT)
        words = {"parts": way.parts, "shape": way.shape, "lossless_of": FULL_CACHE.name if same else None}
        systems.append(System(way.name, "artifact", way.name, **words))
    runner, suite = Runner(target, protocol.sampling), suite_of(protocol)
    records, costs = [], {}
    for system in systems:
        for unit in plan(suite, batch=protocol.batch):
            made = runner.unit(system, unit)
            records += [Record.from_json(json.loads(json.dumps(values))) for values in made["records"]]
            costs[system.name, unit.task.name] = made["times"]
    return runs_of(target, systems, records, protocol, costs=costs)


@pytest.fixture(scope="module")
def parts(target):
    torch.manual_seed(0)
    spec, config = methods.get("longspec"), Config(window=16)
    return spec.attach(spec.build(config, target.info), target, config, {})


@pytest.fixture(scope="module")
def protocol():
    rng = np.random.default_rng(0)
    texts = [Document(f"{kind}1", kind, rng.integers(0, 97, 400)) for kind in ("book", "code")]
    points = choose_points(texts, longest=96, count=6, margin=20).points
    return Protocol(lengths=(32, 96), points=points, max_new_tokens=20, batch=4)


@pytest.fixture(scope="module")
def variants(parts):
    return [Variant("chain", parts, CHAIN), Variant("tree", parts, TREE)]


@pytest.fixture(scope="module")
def runs(target, variants, protocol):
    return run_acceptance(target, variants, protocol)


@pytest.fixture(scope="module")
def found(variants, protocol, runs):
    return scores(variants, protocol, runs=runs, dropped={"x": 2}, resamples=200)


def test_output_is_that_of_plain_decoding(runs):
    for cells in runs.cells.values():
        for cell, plain in zip(cells, runs.plain, strict=True):
            assert cell.tokens == plain.tokens
            assert cell.exactness.compared == 6 and cell.exactness.violations == 0 and cell.exactness.strict


def test_figures_follow_from_the_cycles(found, runs):
    cell = runs.cells["tree"][1]
    cycles = [cycle for row in cell.stats.rows for cycle in row]
    reported = found["variants"][1]["lengths"][1]
    assert reported["tau"]["value"] == pytest.approx(sum(c.accepted + 1 for c in cycles) / len(cycles))
    assert reported["acceptance_rate"]["value"] == pytest.approx(
        sum(c.accepted for c in cycles) / (3 * len(cycles))
    )
    assert reported["node_rate"]["value"] == pytest.approx(
        sum(c.accepted for c in cycles) / (8 * len(cycles))
    )
    assert reported["by_depth"][0]["tried"] == len(cycles)
    assert reported["cycles"] == len(cycles) and reported["prompts"] == 6
    assert reported["cache_bytes"] > 0 and reported["draft_bytes"] > 0
    assert set(reported["by_kind"]) == {"book", "code"}
    assert [place["from"] for place in reported["by_position"]] == [1, 6, 11, 15]
    assert found["kinds"] == {"book": 3, "code": 3} and found["dropped"] == {"x": 2}
    assert [d["length"] for d in found["differences"]] == [32, 96]


def test_scores_are_the_same_on_a_rerun(target, variants, protocol, found):
    again = scores(
        variants, protocol, runs=run_acceptance(target, variants, protocol), dropped={"x": 2}, resamples=200
    )
    assert files.as_json(again) == files.as_json(found)


def test_batching_changes_no_text(target, variants, protocol, runs):
    one = run_acceptance(target, variants[:1], Protocol(**{**vars(protocol), "batch": 1, "compare": False}))
    assert [cell.tokens for cell in one.cells["chain"]] == [cell.tokens for cell in runs.cells["chain"]]
    assert one.plain == [] and one.cells["chain"][0].exactness is None


def test_sampling_by_a_point_law_gives_the_same_text_too(target, variants, protocol):
    heated = Protocol(**{**vars(protocol), "sampling": Sampling(temperature=1.0, seed=3)})
    runs = run_acceptance(target, variants, heated)
    assert runs.cells["tree"][0].tokens == runs.plain[0].tokens
    assert runs.plain[0].tokens != run_acceptance(target, variants[:1], protocol).plain[0].tokens
    iid = [Variant("iid", variants[0].parts, TreeShape((1, 1), Law.IID))]
    assert run_acceptance(target, iid, heated).cells["iid"][0].exactness is None


def test_a_draft_that_reads_the_answer_accepts_everything(target, protocol, runs):
    class Oracle:
        """Proposes what plain decoding said."""

        def __init__(self, inner, plain):
            self.inner, self.want, self.plain = inner, inner.want, plain
            self.start, self.observe, self.bytes = inner.start, inner.observe, inner.bytes

        def propose(self, root, shape, sampling, coins):
            tree = self.inner.propose(root, shape, sampling, coins)
            for row in range(len(root)):
                at = int(self.inner.cache.len_B[row]) - 32 + 1
                said = self.plain[row][at : at + shape.depth]
                tree.tokens_BN[row, 1 : 1 + len(said)] = torch.tensor(said, dtype=torch.long)
            return tree

    spec, config = methods.get("longspec"), Config(window=16)
    inner = spec.attach(spec.build(config, target.info), target, config, {}).draft
    few = Protocol(**{**vars(protocol), "lengths": (32,), "points": protocol.points[:4]})
    variant = Variant("oracle", Parts(Oracle(inner, runs.plain[0].tokens)), CHAIN)
    made = scores([variant], few, runs=run_acceptance(target, [variant], few), resamples=50)
    cell = made["variants"][0]["lengths"][0]
    assert cell["tau"]["value"] > 3.5
    assert cell["by_depth"][0]["rate"]["value"] == 1.0


def test_lengths_and_names_are_checked(target, protocol):
    with pytest.raises(ConfigError, match=r"length 4096 with 20 .* 2048; pass lengths of at most 2028"):
        check(target, ["chain"], Protocol(**{**vars(protocol), "lengths": (32, 4096)}))
    with pytest.raises(ConfigError, match="do not differ in name"):
        check(target, ["chain", "chain"], protocol)


def cell(rows, **stats):
    filled = {
        "prompt_tokens": [8] * len(rows),
        "output_tokens": [9] * len(rows),
        "repeated_tokens": [0] * len(rows),
    }
    return Cell(8, [[1]] * len(rows), Stats(rows=rows, **{**filled, **stats}))


def points(count):
    return [Point(Document("d", "book", np.arange(99)), 50)] * count


def test_pooling_dropping_and_loops(parts):
    """Ended cycles count nowhere, a prompt of only such is dropped, looping texts are told apart."""
    good = [Cycle(1, 3, 3, 3, 4), Cycle(5, 3, 3, 0, 1)]
    rows = [good, [Cycle(1, 3, 3, 1, 1, ended=True)], [Cycle(1, 3, 3, 3, 4)]]
    made = cell(rows, repeated_tokens=[0, 0, 8])
    protocol = Protocol((8,), points(3), max_new_tokens=9)
    found = scores([Variant("a", parts, CHAIN)], protocol, runs=Runs({"a": [made]}, []), resamples=20)
    one = found["variants"][0]["lengths"][0]
    assert one["tau"]["value"] == pytest.approx((4 + 1 + 4) / 3)
    assert one["prompts"] == 2 and one["dropped"] == {"text ended within the first cycle": 1}
    assert one["tau_not_repetitive"]["value"] == pytest.approx(2.5) and one["repetitive_prompts"] == 1
    assert one["repeated_share"] == pytest.approx(8 / 27)
    assert one["by_position"][2]["tau"]["value"] == 1.0


def test_acceptance_of_any_rows():
    chain = [Cycle(1, 3, 3, 3, 4), Cycle(5, 3, 3, 0, 1), Cycle(6, 3, 3, 2, 2, ended=True)]
    tree = [Cycle(1, 2, 8, 2, 3), Cycle(4, 2, 8, 1, 2)]
    found = acceptance_of([chain, tree], Bootstrap(resamples=50), edges=(1, 4, 8))
    assert found["tau"]["value"] == pytest.approx((4 + 1 + 3 + 2) / 4) and found["cycles"] == 4
    assert found["acceptance_rate"]["value"] == pytest.approx((3 + 0 + 2 + 1) / (3 + 3 + 2 + 2))
    assert found["node_rate"]["value"] == pytest.approx((3 + 0 + 2 + 1) / (3 + 3 + 8 + 8))
    assert [(d["accepted"], d["tried"]) for d in found["by_depth"]] == [(3, 4), (2, 3), (1, 1)]
    assert [(p["from"], p["below"]) for p in found["by_position"]] == [(1, 4), (4, 8)]
    assert [p["tau"]["value"] for p in found["by_position"]] == pytest.approx([3.5, 1.5])
    assert acceptance_of([chain, tree], Bootstrap(resamples=50))["by_position"][-1]["below"] == 8
    nothing = acceptance_of([], Bootstrap(resamples=50))
    assert nothing["tau"]["value"] is None and nothing["by_position"] == [] and nothing["by_depth"] == []


def test_differences_pair_the_prompts(parts):
    def rows(bonus):
        return [[Cycle(1, 3, 3, a + bonus, a + bonus + 1)] * 10 for a in (0, 1, 2, 0, 2, 1)]

    runs = Runs({"with": [cell(rows(1))], "without": [cell(rows(0))]}, [])
    variants = [Variant("with", parts, CHAIN), Variant("without", parts, CHAIN)]
    found = scores(variants, Protocol((8,), points(6)), runs=runs, resamples=100)
    gap = found["differences"][0]["tau"]
    assert [gap["value"], gap["low"], gap["high"], gap["n"]] == pytest.approx([1, 1, 1, 6])
    assert found["variants"][0]["lengths"][0]["tau"]["high"] - found["variants"][0]["tau"]["low"] > 0.5


def test_differences_from_plain_decoding_are_judged_by_their_gap(target):
    prompt = list(range(1, 30))
    with torch.no_grad():
        hidden = target.packed(torch.tensor(prompt), torch.arange(29), (0, 29)).hidden[-1][-1]
        ranked = target.head(hidden).sort(descending=True)
    best, second, last = ranked.indices[[0, 1, -1]].tolist()
    gap = float(ranked.values[0] - ranked.values[1])
    found = compare(target, [prompt], [[best, 5]], other=[[second, 5]])
    assert found.differences[0].position == 0
    assert found.differences[0].gap == pytest.approx(gap, abs=1e-5)
    assert found.violations == 1  # fp32 on a CPU allows none
    half = random_target("llama_micro", seed=0).to(torch.bfloat16)
    far = compare(half, [prompt], [[best]], other=[[last]])
    assert not far.strict and far.violations == 1
    assert compare(half, [prompt], [[best]], other=[[best]]).violations == 0
    part = compare(half, [prompt], [[best, 1]], other=[[best]])
    assert part.violations == 1 and part.to_json()["first"][0]["gap"] is None
    assert compare(target, [prompt], [[best]], other=[[last]], greedy=False).violations == 0


def test_speed_is_measured_beside_plain_decoding(target, variants, protocol):
    rows = measure_speed(target, variants, protocol, prompts=2)
    assert [row["length"] for row in rows] == [32, 96]
    figures = rows[0]["figures"]
    assert list(figures) == ["plain", "chain", "tree"] and figures["plain"]["ratio"] == 1.0
    assert figures["tree"]["tokens"] == figures["plain"]["tokens"] == 2 * 19
    for one in figures.values():
        assert one["tokens_per_s"] > 0 and one["peak_device_bytes"] is None


def test_speed_counts_prompts_not_batches(target, variants, protocol):
    told = []
    rows = measure_speed(
        target, variants, protocol, batch=2, prompts=3, advance=lambda what, done: told.append(done)
    )
    assert rows[0]["figures"]["plain"]["tokens"] == 3 * 19
    assert sum(told) == 3 * 3 * 2 and set(told) == {1, 2}  # prompts x ways x lengths


def test_report_holds_the_figures(found, target, variants, protocol, tmp_path):
    speed = {"speed": measure_speed(target, variants, protocol, prompts=1)}
    found = found | {
        "attention_mass": [{"length": 96, "layer": 1, "window": 16, "outside": 0.25, "outside_no_sinks": 0.2}]
    }
    table = report.acceptance_table(found, speed)
    assert f"{found['variants'][1]['lengths'][1]['tau']['value']:.2f} [" in table
    assert (
        "identical" in table
        and "| chain | tree | 96 |" in table
        and "| 96 | 1 | 16 | 25.0% | 20.0% |" in table
    )
    assert "2 x" in table and "depth 3" in table and "×" in table
    picture = report.acceptance_picture(found)
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert report.acceptance_picture(found) == picture
    files.write_files(tmp_path, {"scores.json": files.as_json(found), "a.png": picture})
    assert json.loads((tmp_path / "scores.json").read_text())["prompts"] == 6


def test_a_failed_write_leaves_the_old_files(tmp_path):
    files.write_files(tmp_path / "eval", {"scores.json": b"old"})
    (tmp_path / "eval" / "table.md").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        files.write_files(tmp_path / "eval", {"table.md": b"y", "scores.json": b"new"})
    assert (tmp_path / "eval" / "scores.json").read_bytes() == b"old"
    assert {path.name for path in (tmp_path / "eval").iterdir()} == {"scores.json", "table.md"}


@pytest.mark.parametrize(("count", "text"), [(512, "512"), (1024, "1k"), (1536, "1.5k"), (1025, "1025")])
def test_token_counts_print_short(count, text):
    assert tables.tokens(count) == text
