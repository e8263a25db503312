"""The suite of what a cache changes: exact for what changes nothing, larger for what matters more."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
import torch
from byte_target import byte_target

from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.select import rows_of
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.analysis.compare import compare, load
from longtrain.evaluation.harness.recorded import exempt
from longtrain.evaluation.harness.run import StoppedError
from longtrain.evaluation.harness.session import Session
from longtrain.evaluation.harness.speed import SpeedTest
from longtrain.evaluation.prompt_rows import prompt_rows
from longtrain.evaluation.reporting.comparisons import compare_table
from longtrain.evaluation.reporting.pictures import pictures
from longtrain.evaluation.reporting.tables import table
from longtrain.evaluation.suites import fidelity
from longtrain.files import as_json, jsonl, sealed, write_files
from longtrain.methods.named import Named
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.methods.target_cache import named_cache
from longtrain.systems import Builder
from longtrain.targets.shapes import SHAPES

GREEDY = Sampling()
QUEST = {"method": {"name": "sparse", "rule": "quest", "page": 4}, "window": 4, "label": "quest"}
SNAPKV = {"name": "snapkv", "window": 8, "label": "snapkv"}
WORDS = "amber birch cedar dunes ember flint grove heath inlet jetty knoll larch marsh notch".split()  # noqa: SIM905 (read as text)


@pytest.fixture(scope="module")
def target():
    return byte_target(dtype=torch.float64)


@pytest.fixture
def file(tmp_path):
    """Five prompts of different lengths in a file of JSON lines."""
    path = tmp_path / "asked.jsonl"
    rows = [{"prompt": " ".join(WORDS[i : i + 5 + i])} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def session(target, settings_of, file, tmp_path):
    """`session(entries, budgets)`: a session over the file's prompts; texts are kept in one home."""

    def make(*entries, budgets=(16, 24), folder="one", batch=2, over=None, **changed):
        own = {"prompts": [str(file)], "home": str(tmp_path), "max_new_tokens": 12, "limit": None}
        own |= {"lengths": [32], "chat": False}
        values = settings_of("fidelity", **{**own, **changed})
        used = over or target
        suite = fidelity.build(values, used, seed=0, sampling=GREEDY)
        builder = Builder(used, [Budget(n) for n in budgets], [], load=None)
        systems = builder.systems(entries, roles=suite.needs, taker="suite fidelity")
        suite = suite.meet(suite, systems)
        where = tmp_path / folder
        return Session(used, suite, systems, GREEDY, where, tmp_path, batch=batch, resamples=50)

    return make


def results(one):
    one.work()
    return one.finish().results


def by_name(found):
    return {system["name"]: system for system in found["systems"]}


def test_the_full_cache_and_budgets_of_the_whole_prompt_change_nothing(session):
    """Exactly: the same entries in the same steps give the same bits."""
    found = by_name(results(session("streaming_llm", SNAPKV, budgets=(36, 4096))))
    for name in ("full", "streaming_llm@4096", "snapkv@4096"):
        one = found[name]
        assert one["average"]["value"] == 0.0 and one["metrics"]["agreement"]["value"] == 1.0
        assert one["metrics"]["same answers"]["value"] == 1.0
        assert one["tasks"][0]["kept_share"] == 1.0
        assert one["metrics"]["repeated"] == found["full"]["metrics"]["repeated"]
    evicted = found["streaming_llm@36"]
    assert evicted["average"]["value"] > 0 and 0 < evicted["tasks"][0]["kept_share"] < 1
    assert evicted["versus_full"] is None and exempt(session(SNAPKV).suite)


class Without:
    """Keeps all of a prompt but some positions."""

    name = "without"

    def __init__(self, *gone):
        self.gone = gone

    def extra_tokens(self, longest):
        return 0

    def hook(self, lengths):
        return None

    def select(self, run):
        info, S = run.target.info, max(run.lengths)
        stays = torch.arange(S)[None] < torch.tensor(run.lengths)[:, None]
        stays[:, list(self.gone)] = False
        return rows_of(stays[None, :, None].expand(info.n_layers, -1, info.n_kv_heads, -1).contiguous())


def test_a_planted_eviction_of_what_the_answer_needs_raises_the_divergence(bundled, settings_of, tmp_path):
    """The bundled target answers with a number from the text: without its tokens it cannot; without as many
    tokens of other text it can.
    """
    number = "4829157"
    said = f"One of the special magic numbers for amber-castle is: {number}. "
    other = "The rain fell on the old roof and the wind went round the house. " * 6
    question = "What are all the special magic numbers for amber-castle mentioned in the provided text?"
    message = f"{other}{said}{other}\n{question}"
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps({"prompt": message}))
    changed = {"prompts": [str(path)], "home": str(tmp_path), "max_new_tokens": 24, "lengths": [64]}
    suite = fidelity.build(settings_of("fidelity", **changed), bundled, seed=0, sampling=GREEDY)
    (task,) = suite.tasks
    ids = list(task.prompts[0])
    ends = [len(bundled.tokenizer.decode(ids[:n])) for n in range(len(ids) + 1)]
    at = bundled.tokenizer.decode(ids).index(number)
    needle = [n for n in range(len(ids)) if ends[n + 1] > at and ends[n] < at + len(number)]
    hay = [n + 40 for n in needle]
    assert needle and hay[-1] < len(ids)
    rows = list(task.examples())

    def divergence(*gone):
        (one,) = task.measure(bundled, Parts(evictor=Without(*gone)), rows)
        assert one["kept_entries"] == len(ids) - len(gone)
        return one["divergence"] / one["tokens"]

    assert divergence(*needle) > 10 * divergence(*hay)


def test_results_depend_neither_on_the_batch_nor_on_parts_nor_on_interruptions(session):
    entries = (SNAPKV, {"name": "random", "seed": 3, "window": 8}, QUEST)
    whole = results(session(*entries, folder="whole"))
    parts = [session(*entries, folder="parts") for _ in range(2)]
    for number, one in enumerate(parts):
        one.work(shard=number, shards=2)
    assert as_json(parts[0].finish().results) == as_json(whole)
    cut, left = session(*entries, folder="cut"), iter(range(4))
    with pytest.raises(StoppedError, match="stopped as asked"):
        cut.work(stopping=lambda: next(left, None) is None)
    assert cut.missing()
    assert as_json(results(session(*entries, folder="cut"))) == as_json(whole)
    alone = by_name(results(session(*entries, folder="alone", batch=1)))
    for name, one in by_name(whole).items():
        assert alone[name]["average"]["value"] == pytest.approx(one["average"]["value"], rel=1e-6, abs=1e-12)
        assert alone[name]["metrics"]["agreement"] == one["metrics"]["agreement"]
        assert alone[name]["tasks"][0]["kept_share"] == one["tasks"][0]["kept_share"]


def test_systems_are_compared_with_one_at_the_same_budget(session):
    made = session(SNAPKV, "streaming_llm", against="streaming_llm")
    found = results(made)
    pairs = [(one["first"], one["second"]) for one in found["differences"]]
    assert pairs == [("snapkv@16", "streaming_llm@16"), ("snapkv@24", "streaming_llm@24")]
    systems = by_name(found)
    for one in found["differences"]:
        a, b = (systems[one[key]]["average"]["value"] for key in ("first", "second"))
        assert one["quotient"]["value"] == pytest.approx(a / b) and one["quotient"]["n"] == 5
        assert one["quotient"]["low"] <= a / b <= one["quotient"]["high"]
        assert one["score"]["difference"]["value"] == pytest.approx(a - b)
    shown = table(found)
    for words in (
        "| system | KL per token | agreement | repeated | cache kept |",
        "quotient of KL per token",
    ):
        assert words in shown
    assert "vs full" not in shown
    assert pictures(found)["budget.png"].startswith(b"\x89PNG")
    first = session(SNAPKV, "streaming_llm")
    assert first.suite.rivals(first.systems)[0] == ("streaming_llm@16", "snapkv@16")


def test_quantised_caches_and_selectors_are_judged_too(session, tmp_path):
    """The quantised cache holds its newest 128 tokens or more in full precision, so prompts are longer."""
    wide = byte_target(dtype=torch.float32, head_dim=64)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": " ".join(WORDS * 6)}))
    caches = {"cache": "int8"}, {"cache": "int4"}
    made = session(QUEST, *caches, budgets=(16,), over=wide, prompts=[str(long)])
    shown = table(results(made))
    found = by_name(made.finish().results)
    quest, int8, int4 = (found[name] for name in ("quest@16", "int8", "int4"))
    assert quest["tasks"][0]["kept_share"] == 1.0 > quest["metrics"]["entries read"]["value"]
    assert 0 < int8["average"]["value"] < int4["average"]["value"]
    assert int8["metrics"]["entries read"]["value"] == 1.0
    assert int8["metrics"]["cache"]["value"] != int8["metrics"]["full cache"]["value"]
    assert "int8, int4: the bytes of the cache include buffers" in shown
    assert "| int8 |" in shown and pictures(made.finish().results)["budget.png"]


def test_layers_with_a_window_take_the_same_bytes_in_a_quantised_cache(session, tmp_path):
    shape = {**SHAPES["gemma3_micro"], "vocab_size": 257, "head_dim": 64, "query_pre_attn_scalar": 64}
    near = byte_target(**shape)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "amber " * 30}))
    made = session({"cache": "int8"}, over=near, prompts=[str(long)])
    metrics = by_name(results(made))["int8"]["metrics"]
    info, entry = near.info, 2 * near.info.n_kv_heads * 64 * 4
    seen = entry * sum(info.windows)
    assert 0 < max(info.windows) < 180 and info.full_layers
    quantised = named_cache(Named("int8", {}), near)(1, 180, 1).full.bytes()
    assert metrics["cache"]["value"] == quantised + seen
    assert metrics["full cache"]["value"] == seen + len(info.full_layers) * 180 * entry


def test_answers_end_where_the_target_ends_them(session, target, monkeypatch):
    plain = session(SNAPKV)
    results(plain)
    tokens = [one.text for some in plain.suite.tasks[0].known.values() for one in some]
    end = tokens[0][3]
    monkeypatch.setattr(target, "info", target.info.__class__(**{**vars(target.info), "eos_ids": (end,)}))
    ended = session(SNAPKV, folder="ended", home=str(plain.home / "other"))
    results(ended)
    for some in ended.suite.tasks[0].known.values():
        for one in some:
            assert end not in one.text[:-1]
    assert any(one.text[-1] == end for some in ended.suite.tasks[0].known.values() for one in some)


def test_longbench_and_running_text_are_prompts(session, tmp_path):
    rows = [{"input": f"What is {i}?", "context": "abc " * 30, "answers": ["x"]} for i in range(3)]
    (tmp_path / "qasper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rain.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 20)
    more = {"prompts": ["qasper", str(tmp_path / "rain.txt")], "data": str(tmp_path), "limit": 2}
    made = session(SNAPKV, **more, max_prompt_tokens=400, lengths=[64, 128])
    names = [task.name for task in made.suite.tasks]
    assert names == ["qasper", "rain.txt 64", "rain.txt 128"]
    assert [len(task.rows) for task in made.suite.tasks] == [2, 2, 2]
    assert all(len(ids) == 128 for ids in made.suite.tasks[2].prompts)
    assert any("2 of 2 prompts of qasper cut in the middle" in note for note in made.suite.notes)
    found = results(made)
    averages = {system["name"]: system["average"]["value"] for system in found["systems"]}
    each = [one["score"]["value"] for one in by_name(found)["snapkv@16"]["tasks"]]
    assert averages["snapkv@16"] == pytest.approx(sum(each) / 3)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a"}, "a"),
        ({"turns": ["a", "b"]}, "a"),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, "a"),
        ({"problem": "a", "answer": 3}, "a"),
        ({"context": "c", "input": "a"}, "c\n\na"),
        ({"input": "a", "outputs": ["b"]}, "a"),
        (
            {"context": "c", "input": "a", "dataset": "lcc"},
            "Please complete the code given below. \ncNext line of code:\n",
        ),
    ],
)
def test_rows_of_benchmarks_and_users(tmp_path, row, prompt):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert [one.fields["prompt"] for one in prompt_rows(str(path))] == [prompt]


def test_what_is_refused(session, tmp_path, file):
    with pytest.raises(ConfigError, match=r"fidelity judges .* none is given; pass artifact=NAME, or"):
        session()
    with pytest.raises(ConfigError, match=r"suite\.against=laq; allowed: snapkv, or null"):
        session(SNAPKV, against="laq")
    with pytest.raises(ConfigError, match=r"suite\.prompts=\[\]; allowed: LongBench tasks, files"):
        session(SNAPKV, prompts=[])
    with pytest.raises(ConfigError, match=r"suite\.prompts=qaspar; .*LongBench's tasks .*qasper"):
        session(SNAPKV, prompts=["qaspar"])
    with pytest.raises(ConfigError, match=r"suite\.max_new_tokens=\d+; allowed: 1 to \d+"):
        session(SNAPKV, max_new_tokens="1000k")
    with pytest.raises(ConfigError, match="brings a draft, which suite fidelity has no use for"):
        session({"name": "prompt_lookup"})
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"title": "b"}')
    with pytest.raises(DataError, match=r"bad.jsonl:2: no prompt among the fields title; allowed: prompt"):
        session(SNAPKV, prompts=[str(bad)])


def test_scores_are_computed_once_for_all_budgets(session, monkeypatch):
    asked, scores = [], SnapKV.scores

    def counted(self, run):
        asked.append(self.budget.tokens)
        return scores(self, run)

    alone = [results(session(SNAPKV, budgets=(n,), folder=f"{n}"))["systems"][1] for n in (16, 24)]
    monkeypatch.setattr(SnapKV, "scores", counted)
    both = results(session(SNAPKV, budgets=(16, 24), folder="both"))["systems"][1:]
    assert asked == [16, 16, 16] and both == alone


def test_two_runs_are_compared_and_speed_is_timed_on_the_same_prompts(session, target, tmp_path):
    made = {}
    for name, entry in (("one", SNAPKV), ("two", {**SNAPKV, "kernel": 1})):
        run = session(entry, folder=name, budgets=(16,))
        run.work()
        outcome = run.finish()
        lines = jsonl(outcome.examples)
        results_json = sealed({**outcome.results, "examples_sha256": sha256(lines).hexdigest()})
        write_files(tmp_path / name, {"results.json": results_json, "examples.jsonl": lines})
        made[name] = by_name(outcome.results)["snapkv@16"]["average"]["value"]
    compared = compare(*load([tmp_path / "one", tmp_path / "two"]))
    (pair,) = [one for one in compared["pairs"] if one["name"] == "snapkv@16"]
    assert pair["average"]["difference"]["value"] == pytest.approx(made["two"] - made["one"])
    assert f"{made['two'] - made['one']:+.3g}" in compare_table(compared)
    test = SpeedTest(target, run.systems, run.suite, GREEDY, prompts=2)
    (row,) = test.rows()
    assert row["task"] == "asked.jsonl" and row["metrics"]["snapkv@16"]["ratio"] > 0
