import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from longtrain.decoding.stats import Cycle
from longtrain.errors import DataError
from longtrain.evaluation.analysis.acceptance import ACCEPTANCE
from longtrain.evaluation.analysis.results import assemble
from longtrain.evaluation.analysis.statistics import Bootstrap
from longtrain.evaluation.records import Record, Turn
from longtrain.evaluation.reporting.examples import examples
from longtrain.evaluation.reporting.pictures import pictures
from longtrain.evaluation.reporting.tables import table
from longtrain.evaluation.suite import DIVERGENCE, Scale, Suite, Summary
from longtrain.evaluation.task import Example, Measured, Task
from longtrain.systems import System

FULL = System("full", "full", "full")
SMALL = System("snapkv@64", "policy", "snapkv", "64")


class Hashed:
    hash = "00ff00ff00ff00ff"
    settings = {"suite": "s"}


def task(name, n=8, **more):
    rows = tuple(
        Example(f"{name}-{i}", {"text": f"text {i}", "length": 1024 * (1 + i % 2)}) for i in range(n)
    )
    return Facetted(name, rows, "{text}", 32, "f1", judge=None, **more)


class Facetted(Task):
    def facets(self, example):
        return {"length": example.fields["length"]}


def record(system, example, score, *, tokens=(1, 2, 3), task="qa", **more):
    turn = Turn("words", tuple(tokens), "length", 100, 64.0 if system.budget else 100.0)
    facets = {"length": 1024 * (1 + int(example.split("-")[1]) % 2)}
    return Record(system.name, task, example, facets, 100, "", False, (turn,), score, **more)


def run(suite, systems, records, **more):
    more = {
        "target": {"name": "t", "weights_hash": "w", "dtype": "float32"},
        "draw": Bootstrap(resamples=200),
        **more,
    }
    return assemble(suite, systems, records, protocol=Hashed(), **more)


def entry(results, system):
    return next(one for one in results["systems"] if one["name"] == system)


@pytest.fixture
def two():
    """A task of eight examples; the small cache loses 0.1 of every score."""
    suite = Suite("s", (task("qa"),))
    scores = [0.2 + 0.1 * i for i in range(8)]
    records = [record(FULL, f"qa-{i}", score) for i, score in enumerate(scores)]
    records += [record(SMALL, f"qa-{i}", score - 0.1) for i, score in enumerate(scores)]
    return suite, records


def test_scores_averages_and_paired_differences(two):
    suite, records = two
    results = run(suite, [FULL, SMALL], records)
    full, small = entry(results, "full"), entry(results, "snapkv@64")
    assert full["tasks"][0]["score"]["value"] == pytest.approx(55)
    assert full["tasks"][0]["official"] == 55.0
    assert full["versus_full"] is None and full["tasks"][0]["versus_full"] is None
    gap = small["tasks"][0]["versus_full"]
    assert gap["difference"]["value"] == pytest.approx(-10)
    assert gap["difference"]["low"] == pytest.approx(-10)  # paired: the spread of the scores is not noise
    assert gap["larger_than_noise"]
    assert full["average"]["low"] < 45 < 65 < full["average"]["high"]
    assert small["tasks"][0]["kept_entries"] == 64
    assert small["tasks"][0]["kept_share"] == pytest.approx(0.64)


def test_results_do_not_depend_on_the_order_of_records(two):
    suite, records = two
    shuffled = random.Random(3).sample(records, len(records))
    assert json.dumps(run(suite, [FULL, SMALL], shuffled)) == json.dumps(run(suite, [FULL, SMALL], records))


def test_intervals_depend_neither_on_the_order_of_tasks_nor_on_other_tasks(made):
    """Tasks of 10, 3, 10, 2 and 40 examples: the small ones share their deviations in an average."""
    systems = [one for one in made.systems if one.name in ("full", "snapkv@64", "longspec_llama8b")]
    few = {"qasper": 3, "lcc": 2}
    every = [one for one in made.records if int(one.example.split("-")[1]) < few.get(one.task, 99)]
    every = [
        replace(one, measures={"divergence": one.score, "tokens": float(len(one.example))})
        for one in every
        if one.system in [system.name for system in systems]
    ]

    def results(scale, *names):
        tasks = tuple(task for name in names for task in made.suite.tasks if task.name == name)
        suite = replace(made.suite, tasks=tasks, scale=scale, rivals=lambda _: [("snapkv@64", "full")])
        found = run(suite, systems, [one for one in every if one.task in names])
        own = [*found["cells"], *found["differences"]]
        for system in found["systems"]:
            own += system.pop("tasks")
        return found["systems"], {json.dumps(one, sort_keys=True) for one in own}

    names = ("needle", "lcc", "narrativeqa", "qasper", "gov_report")
    for scale in (Scale(), Scale(DIVERGENCE, None, False)):
        whole = results(scale, *names)
        assert results(scale, *reversed(names)) == results(scale, *sorted(names)) == whole
        fewer, own = results(scale, *names[1:])
        assert {one for one in own if '"average"' not in one} < whole[1] and fewer != whole[0]


def test_cells_and_facets_split_the_scores(two):
    suite, records = two
    results = run(suite, [FULL, SMALL], records)
    cells = [cell for cell in results["cells"] if cell["system"] == "full"]
    assert [(cell["facets"], cell["score"]["n"]) for cell in cells] == [
        ({"length": 1024}, 4),
        ({"length": 2048}, 4),
    ]
    assert cells[0]["score"]["value"] == pytest.approx(50)
    facets = entry(results, "full")["facets"]
    assert [(one["facet"], one["value"]) for one in facets] == [("length", 1024), ("length", 2048)]
    assert facets[1]["score"]["value"] == pytest.approx(60)


def test_a_facet_weighs_tasks_alike():
    suite = Suite("s", (task("qa", 2), task("needle", 8)))
    records = [record(FULL, f"qa-{i}", 1.0) for i in range(2)]
    records += [record(FULL, f"needle-{i}", 0.0, task="needle") for i in range(8)]
    facets = entry(run(suite, [FULL], records), "full")["facets"]
    assert [one["score"]["value"] for one in facets] == [50, 50]


def test_unjudged_answers_are_counted_and_left_out(two):
    suite, records = two
    records[0] = replace(records[0], score=None)
    results = run(suite, [FULL, SMALL], records)
    full = entry(results, "full")["tasks"][0]
    assert (full["unjudged"], full["score"]["n"], full["rows"]) == (1, 7, 8)
    assert entry(results, "snapkv@64")["versus_full"]["difference"]["n"] == 7
    nothing = run(suite, [FULL], [replace(one, score=None) for one in records if one.system == "full"])
    assert entry(nothing, "full")["average"] == {"value": None, "low": None, "high": None, "n": 0}
    json.dumps(nothing, allow_nan=False)


def test_perplexity_pools_nats_over_tokens():
    class Corpus(Measured):
        def __init__(self):
            self.name, self.rows = "text", tuple(Example(f"text-{i}", {}) for i in range(3))

        def settings(self):
            return {}

        def measure(self, target, parts, examples):
            raise AssertionError("nothing is measured here")

    suite = Suite(
        "perplexity", (Corpus(),), scale=Scale("perplexity", None, False), summarise=lambda _: Summary()
    )
    found = [
        {"nats": n, "tokens": t, "kept_entries": 50.0, "context_tokens": 100}
        for n, t in [(20, 10), (33, 11), (8, 5)]
    ]
    records = [Record("full", "text", f"text-{i}", {}, measures=one) for i, one in enumerate(found)]
    line = entry(run(suite, [FULL], records), "full")["tasks"][0]
    assert line["score"]["value"] == pytest.approx(math.exp(61 / 26))
    assert 1 <= line["score"]["low"] < math.exp(8 / 5) and line["score"]["high"] > math.exp(3)
    assert (line["unjudged"], line["kept_share"], line["output_tokens"]) == (0, 0.5, None)


DRAFT = System("draft", "artifact", "draft", lossless_of="full")


def drafted(hits, tokens=(1, 2, 3), example="qa-0"):
    cycles = (tuple(Cycle(1 + 2 * i, 4, 4, hit, hit + 1) for i, hit in enumerate(hits)),)
    return record(DRAFT, example, 1.0, tokens=tokens, cycles=cycles)


class Watched(Measured):
    """A task that runs the target and writes no text."""

    def __init__(self):
        self.name, self.rows = "attention", tuple(Example(f"attention-{i}", {}) for i in range(4))

    def settings(self):
        return {}

    def measure(self, target, parts, examples):
        raise AssertionError("nothing is measured here")


def test_what_is_compared_are_texts():
    """Tasks without texts count nothing; of several turns those that had the same prompt count."""
    suite = Suite("s", (task("qa", 3), Watched()))
    one, other = (Turn("words", tokens, "length", 100, 100.0) for tokens in ((1, 2), (1, 9)))
    turns = {"qa-0": ((one, one), (one, one)), "qa-1": ((one, one), (other, one)), "qa-2": ((one,), (one,))}
    records = [
        replace(record(system, example, 1.0), turns=both[side])
        for example, both in turns.items()
        for side, system in enumerate((FULL, DRAFT))
    ]
    records += [
        Record(system.name, "attention", f"attention-{i}", {}, measures={"share": 0.5})
        for system in (FULL, DRAFT)
        for i in range(4)
    ]
    target = {"name": "t", "weights_hash": "w", "dtype": "float32", "strict": True}
    results = run(suite, [FULL, DRAFT], records, target=target)
    exact = {one["task"]: one["exactness"] for one in entry(results, "draft")["tasks"]}
    assert exact["attention"] is None
    assert (exact["qa"]["compared"], exact["qa"]["different"]) == (4, 1)
    assert "3/4 the same, 1 beyond rounding" in table(results)


def test_texts_within_rounding_and_beyond_are_counted_apart():
    suite = Suite("s", (task("qa", 3),))
    records = [record(FULL, f"qa-{i}", 1.0) for i in range(3)]
    records += [record(DRAFT, f"qa-{i}", 1.0, tokens=(1, 2, 3 + (i > 0))) for i in range(3)]

    def judge(system, name, some, partings):
        assert (system, name, len(some), len(partings)) == (DRAFT, "qa", 3, 2)
        noise = {"largest": 0.25, "texts": texts}
        said = {"violations": 1, "wrong": 0, "judged": True, "largest_gap": 0.6, "noise": noise}
        return said, [{"gap": 0.1, "multiple": 0.4}, {"gap": 0.6, "multiple": 2.4}]

    texts = 0
    results = run(suite, [FULL, DRAFT], records, judge=judge)
    assert "(gap of the logits up to 0.6; numbers there lie apart by up to 0.25)" in table(results)
    texts = 2
    results = run(suite, [FULL, DRAFT], records, judge=judge)
    exact = entry(results, "draft")["tasks"][0]["exactness"]
    assert [one["multiple"] for one in exact["first"]] == [0.4, 2.4]
    shown = table(results)
    assert "1/3 the same, 1 within rounding, 1 beyond rounding" in shown
    assert (
        "qa: 2 of 3 texts differ (gap of the logits up to 0.6; rounding moves it by up to 0.25 here), "
        "1 beyond rounding; qa-1 at token 2"
    ) in shown


def test_acceptance_of_drafts_and_where_their_texts_part():
    suite = Suite("s", (task("qa", 2),))
    records = [record(FULL, "qa-0", 1.0), record(FULL, "qa-1", 1.0)]
    records += [drafted([4, 2]), drafted([0], tokens=(1, 2, 9), example="qa-1")]
    for strict in (True, False):
        target = {"name": "t", "weights_hash": "w", "dtype": "float32", "strict": strict}
        results = run(suite, [FULL, DRAFT], records, target=target)
        line = entry(results, "draft")["tasks"][0]
        assert line["acceptance"]["tau"]["value"] == pytest.approx((5 + 3 + 1) / 3)
        assert line["acceptance"]["acceptance_rate"]["value"] == pytest.approx(6 / 12)
        exact = line["exactness"]
        assert (exact["compared"], exact["different"]) == (2, 1)
        assert exact["first"] == [{"example": "qa-1", "turn": 1, "position": 2}]
        assert exact["violations"] == (1 if strict else None)
    assert entry(results, "full")["acceptance"] is None
    assert entry(results, "full")["tasks"][0]["exactness"] is None
    by_length = entry(results, "draft")["facets"]
    assert [one["acceptance"]["value"] for one in by_length] == [4, 1]


def test_where_acceptance_is_the_figure_plain_decoding_has_one_token_a_cycle():
    suite = Suite("s", (task("qa", 2),), scale=Scale(ACCEPTANCE, None, True))
    records = [record(FULL, f"qa-{i}", None) for i in range(2)] + [
        drafted([4, 2]),
        drafted([0], example="qa-1"),
    ]
    results = run(suite, [FULL, DRAFT], records)
    assert entry(results, "full")["average"]["value"] == 1
    assert entry(results, "draft")["average"]["value"] == 3


def test_acceptance_by_place_covers_the_whole_output():
    suite = Suite("s", (replace(task("qa", 1), max_new_tokens=512),))
    places = entry(run(suite, [DRAFT], [drafted([1])]), "draft")["acceptance"]["by_position"]
    assert (places[0]["from"], places[-1]["below"], len(places)) == (1, 512, 8)


def test_records_of_one_example_have_one_prompt(two):
    suite, records = two
    mixed = [replace(r, prompt_sha256="b" * 16) if r.system == SMALL.name else r for r in records]
    with pytest.raises(DataError, match=r"another prompt than with system full \(b{16} and "):
        run(suite, [FULL, SMALL], mixed)


def test_a_result_has_the_benchmarks_name_only_if_every_system_earns_it(two):
    suite, records = two
    suite = replace(suite, title="S", notes=("everybody's",))
    cut = [replace(r, cut=True) if r.system == SMALL.name else r for r in records]
    found = run(suite, [FULL, SMALL], cut)
    assert found["title"] == "Variant of S" and "everybody's" in found["notes"]
    assert found["notes"][-2:] == ["full alone: S", "snapkv@64 alone: Variant of S"]
    alone = run(suite, [FULL], [r for r in records if r.system == "full"])
    assert (alone["title"], alone["notes"]) == ("S", ["everybody's"])


def test_one_example_has_figures_without_intervals(two):
    suite, records = two
    found = run(suite, [FULL, SMALL], [r for r in records if r.example == "qa-0"])
    for system in found["systems"]:
        assert system["average"]["value"] is not None and system["average"]["low"] is None
    versus = found["systems"][1]["versus_full"]
    assert versus["difference"]["low"] is None and not versus["larger_than_noise"]
    shown = table(found)
    assert "nan" not in shown.lower() and f"{found['systems'][0]['average']['value']:.2f} |" in shown
    assert all(picture.startswith(b"\x89PNG") for picture in pictures(found).values())


class Letters:
    """A tokenizer of characters."""

    chat_template = None

    def __call__(self, text, **_):
        raise AssertionError("only encode and decode are needed")

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


class Spelt(Facetted):
    def encode(self, example, tokenizer, *, max_tokens):
        from longtrain.evaluation.prompts import Encoded

        return Encoded(tuple(map(ord, example.fields["text"]))[:max_tokens])


@pytest.mark.parametrize(
    ("length", "start", "end"),
    [(10, 10, 0), (1000, 1000, 0), (1001, 300, 700), (5000, 300, 700)],
)
def test_examples_show_the_ends_of_a_prompt(length, start, end):
    text = "".join(random.Random(0).choices("abcdef", k=length))
    rows = (Example("qa-0", {"text": text, "length": 1024}),)
    suite = Suite("s", (Spelt("qa", rows, "", 32, "f1", judge=None),))
    records = [record(FULL, "qa-0", 0.5), record(SMALL, "qa-0", 0.25)]
    (line,) = examples(suite, [FULL, SMALL], records, Letters(), max_tokens={"qa": 9000})
    assert line["prompt_start"] == text[:start]
    assert line["prompt_end"] == (text[-end:] if end else "")
    assert list(line["outputs"]) == ["full", "snapkv@64"]
    assert line["outputs"]["snapkv@64"] == {"texts": ["words"], "score": 0.25, "output_tokens": 3}


def test_what_is_not_in_a_result_is_no_example(two):
    suite, records = two
    lines = list(examples(suite, [FULL, SMALL], records[:3], Letters(), max_tokens={}))
    assert [line["example"] for line in lines] == ["qa-0", "qa-1", "qa-2"]


def test_numbers_of_numpy_become_plain(two):
    suite, records = two
    results = run(
        suite, [FULL], [r for r in records if r.system == "full"], baseline={"score": np.float64(1.5)}
    )
    assert json.loads(json.dumps(results))["baseline"] == {"score": 1.5}
