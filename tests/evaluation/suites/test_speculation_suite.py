from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from byte_target import byte_target

from longtrain.decoding.roles import TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.stats import Cycle
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.analysis.results import assemble
from longtrain.evaluation.analysis.statistics import Bootstrap
from longtrain.evaluation.harness.plan import plan
from longtrain.evaluation.harness.protocol import protocol_of
from longtrain.evaluation.harness.run import Runner
from longtrain.evaluation.harness.speed import SpeedTest
from longtrain.evaluation.records import Record
from longtrain.evaluation.reporting.comparisons import speed_summary, speed_table
from longtrain.evaluation.suites import documents, drafted, speculation
from longtrain.systems import FULL_CACHE, System
from tests.helpers import attached

SETTINGS = {
    "name": "speculation",
    "tasks": [*speculation.LONG, "aime24"],
    "documents": None,
    "lengths": None,
    "limit": None,
    "min_prompt_tokens": 400,
    "max_prompt_tokens": None,
    "max_new_tokens": 12,
    "aime24_max_new_tokens": 10,
    "documents_max_new_tokens": 8,
    "ignore_eos": True,
    "chat": True,
}
DOCUMENTS = {"tasks": ["multi_lexsum"], "lengths": [600, "1k"], "limit": 2}


@pytest.fixture(scope="module")
def target():
    return byte_target(begin=True)


@pytest.fixture(scope="module")
def systems(target):
    torch.manual_seed(0)
    parts = attached("longspec", target, window=16)
    return [FULL_CACHE, System("draft", "artifact", "draft", parts=parts, shape=TreeShape((2, 2)))]


@pytest.fixture
def data(tmp_path):
    row = {"input": "q", "answers": ["a"], "length": 3, "language": "en", "all_classes": None}
    for name in speculation.LONG:
        texts = ["short", "x" * 500, "y" * 1500]
        rows = [row | {"context": text, "dataset": name, "_id": f"{name}{i}"} for i, text in enumerate(texts)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = [{"id": i, "problem": f"What is {i}+{i}?", "answer": 2 * i} for i in range(3)]
    (tmp_path / "aime.jsonl").write_text("\n".join(map(json.dumps, problems)))
    return tmp_path


def build(target, folder, **changes):
    paths = {"data": str(folder), "aime24": str(folder / "aime.jsonl")}
    return speculation.build({**SETTINGS, **paths, **changes}, target, seed=0, sampling=Sampling())


def run(target, suite, system):
    runner = Runner(target, Sampling())
    records = {}
    for unit in plan(suite, batch=2):
        for values in runner.unit(system, unit)["records"]:
            records.setdefault(unit.task.name, []).append(Record.from_json(values))
    return records


def test_tasks_give_long_answers_to_long_prompts(target, data):
    suite = build(target, data)
    assert [task.name for task in suite.tasks] == [*speculation.LONG, "aime24"]
    report = suite.tasks[0]
    # the template alone has some 200 bytes: "short" is left out
    assert [row.id for row in report.examples()] == ["gov_report1", "gov_report2"]
    assert [report.facets(row) for row in report.examples()] == [{"length": 1024}, {"length": 2048}]
    assert (
        report.max_new_tokens == 12 and report.ignore_eos and report.chat and report.score("t", None) is None
    )
    code = suite.tasks[3]
    assert not code.chat and code.settings()["protocol"] == {"min_prompt_tokens": 400}
    contest = suite.tasks[-1]
    assert contest.max_new_tokens == 10 and not contest.ignore_eos and contest.score("t", None) is None
    assert contest.facets(next(contest.examples())) == {"length": 1024}
    notes = " ".join(suite.summary({}).notes)
    assert "answers of 12 tokens, the end of text ignored" in notes and "5 prompts of at most 400" in notes
    assert suite.needs == {"draft", "evictor", "selector"}


def test_figures_are_those_of_the_cycles(target, data, systems):
    suite = build(target, data, tasks=["lcc", "aime24"])
    plain, drafted = (run(target, suite, system) for system in systems)
    for name, some in drafted.items():
        assert [r.turns[0].tokens for r in some] == [r.turns[0].tokens for r in plain[name]]
    assert all(record.output_tokens == 12 for record in drafted["lcc"])
    found = suite.summary(drafted)
    cycles = [cycle for record in drafted["lcc"] for row in record.rows() for cycle in row]
    metrics = found.extra["acceptance"]["lcc"]
    assert found.tasks["lcc"] == round(sum(c.accepted + 1 for c in cycles) / len(cycles), 4) == metrics["tau"]
    assert metrics["acceptance_rate"] == round(sum(c.accepted for c in cycles) / (2 * len(cycles)), 4)
    assert set(metrics["by_length"]) == {"1024", "2048"}
    assert sum(one["cycles"] for one in metrics["by_length"].values()) == metrics["cycles"] == len(cycles)
    assert suite.summary(plain).tasks == {} and suite.summary(plain).average is None
    records = [record for some in (plain, drafted) for rows in some.values() for record in rows]
    protocol = protocol_of(suite, target, Sampling())
    made = assemble(
        suite, systems, records, protocol=protocol, target={"name": "t"}, draw=Bootstrap(resamples=50)
    )
    full, draft = ({task["task"]: task for task in one["tasks"]} for one in made["systems"])
    assert full["lcc"]["score"]["value"] == 1.0 and full["lcc"]["official"] is None
    assert draft["lcc"]["score"]["value"] == pytest.approx(metrics["tau"], abs=1e-4)
    assert draft["lcc"]["official"] == metrics["tau"] and draft["lcc"]["unjudged"] == 0
    assert draft["lcc"]["acceptance"]["acceptance_rate"]["value"] == pytest.approx(
        metrics["acceptance_rate"], abs=1e-4
    )


def test_acceptance_is_pooled_and_ended_cycles_are_left_out():
    rows = ((Cycle(1, 4, 4, 4, 5), Cycle(6, 4, 4, 0, 1)), (Cycle(1, 4, 4, 2, 1, ended=True),))
    records = [Record("d", "t", str(i), {"length": 1024 << i}, cycles=(row,)) for i, row in enumerate(rows)]
    found = drafted.acceptance_summary({"t": records})
    assert found.tasks == {"t": 3.0} and found.average == 3.0
    assert found.extra["acceptance"]["t"]["acceptance_rate"] == 0.5
    assert found.extra["acceptance"]["t"]["by_length"]["2048"]["tau"] is None
    assert [drafted.length_bucket(n) for n in (1, 1024, 1025, 4096, 4097)] == [1024, 1024, 2048, 4096, 8192]


def test_speed_is_timed_in_turn_on_the_first_prompts(target, data, systems):
    suite = build(target, data, tasks=["gov_report", "aime24"])
    told = []
    test = SpeedTest(target, systems, suite, Sampling(), prompts=2, batches=[2])
    rows = test.rows(lambda what, done: told.append((what, done)))
    assert [row["task"] for row in rows] == ["gov_report", "aime24"]
    row = rows[0]
    assert (row["length"], row["prompts"], row["batch"], row["max_new_tokens"]) == (None, 2, 2, 12)
    assert list(row["metrics"]) == ["full", "draft"] and row["metrics"]["full"]["ratio"] == 1.0
    assert row["metrics"]["draft"]["tokens"] == row["metrics"]["full"]["tokens"] == 2 * 11
    assert row["metrics"]["draft"]["ratio"] > 0 and row["metrics"]["draft"]["draft_bytes"] > 0
    assert sum(done for _, done in told) == test.steps == 8
    json.dumps(rows, allow_nan=False)
    results = {
        "title": "T",
        "target": {"name": "t"},
        "cells": [],
        "systems": [
            {"name": name, "tasks": [{"task": "gov_report", "acceptance": tau}]}
            for name, tau in (("full", None), ("draft", {"tau": {"value": 3.25}}))
        ],
    }
    table = speed_table(results, {"device": "cpu", "speed": rows})
    ratio = row["metrics"]["draft"]["ratio"]
    assert "| gov_report | full | - |" in table and "| gov_report | draft | 3.25 |" in table
    assert f"{ratio:.2f} ×" in table and "2 of gov_report (12 tokens each)" in table
    assert table.count("Measured on a CPU") == 1 and "do not predict speed on a GPU" in table
    low, high = row["metrics"]["draft"]["ratio_range"]
    assert low == high == ratio  # one batch; several show how far they are apart
    row["metrics"]["draft"]["ratio_range"] = [ratio / 2, 2 * ratio]
    again = speed_table(results, {"device": "cuda:0", "speed": rows})
    assert f"{ratio:.2f} × ({ratio / 2:.2f} to {2 * ratio:.2f})" in again and "a CPU" not in again
    assert speed_table(results, {"device": "cpu"}) == ""
    row["max_new_tokens"] = 1  # then the time to the first token is what was measured
    row["metrics"]["draft"] |= {"first_token_s": 0.0735, "first_token_overhead": 3.071}
    first = speed_table(results, {"device": "cuda:0", "speed": [row]})
    assert "| draft | 73.5 | +307.1% |" in first and "tokens/s" not in first and "(1 token each)" in first
    header, lines = speed_summary({"device": "cuda:0", "speed": [row]})
    assert header[1:] == ["ms to the first token", "more than the full cache"]
    assert lines[1][1:] == ["73.5", "+307.1%"]


def test_texts_over_at_once_have_no_speed(target, data, systems):
    """The first token of plain decoding as an end of text leaves no cycle to time."""
    suite = build(target, data, tasks=["aime24"], limit=1)
    record = run(target, suite, FULL_CACHE)["aime24"][0]
    ending = byte_target(begin=True)
    ending.info = ending.info.__class__(**{**vars(ending.info), "eos_ids": (record.turns[0].tokens[0],)})
    (found,) = SpeedTest(ending, systems[:1], suite, Sampling(), prompts=1).rows()
    metrics = found["metrics"]["full"]
    assert metrics["tokens"] == 0 and metrics["ratio"] is None
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"min_prompt_tokens": 5000},
            DataError,
            "no prompt of gov_report has more than 5000 tokens, the longest has 1",
        ),
        (
            {"tasks": ["hotpotqa"]},
            ConfigError,
            r"suite.tasks=\['hotpotqa'\]; allowed: each once of gov_report",
        ),
        ({"max_new_tokens": 1}, ConfigError, "suite.max_new_tokens=1"),
        ({"max_new_tokens": 4000}, ConfigError, "suite.max_new_tokens=4000; allowed: 2 to 2046"),
        ({"ignore_eos": "often"}, ConfigError, "suite.ignore_eos=often; allowed: true or false"),
        ({"data": "/no/where"}, ConfigError, "/no/where"),
    ],
)
def test_wrong_settings_are_named(target, data, settings, error, message):
    with pytest.raises(error, match=message):
        build(target, data, **settings)


def test_settings_are_those_of_the_configuration(settings_of):
    """A key that the suite did not read, or read and nobody can set, would be a promise not kept."""
    run = {"batch", "speed_prompts", "speed_batch"}
    assert set(settings_of("speculation")) == {*SETTINGS, "data", "aime24", *run}


@pytest.fixture
def lawsuits(tmp_path):
    cases = [["short"], ["a" * 400, "b"], ["c" * 600, "d" * 600], ["e" * 2000], ["f" * 2000]]
    rows = [{"id": str(i), "sources": sources, "summary/short": "s"} for i, sources in enumerate(cases)]
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def corpus(target, path, **changes):
    return build(target, path.parent, **{**DOCUMENTS, "documents": str(path), **changes})


def test_documents_fill_prompts_of_the_stated_length(target, lawsuits):
    suite = corpus(target, lawsuits)
    (task,) = suite.tasks
    rows = list(task.examples())
    assert [(row.fields["length"], row.fields["document"]) for row in rows] == [
        (600, "cases.jsonl:2"),
        (600, "cases.jsonl:3"),
        (1024, "cases.jsonl:3"),
        (1024, "cases.jsonl:4"),
    ]
    for row in rows:
        ids = task.encode(row, target.tokenizer, max_tokens=99999).ids
        assert len(ids) == task.size(row) == row.fields["length"] == task.facets(row)["length"]
        assert ids[0] == 256
        text = target.tokenizer.decode(ids[1:])
        assert text.startswith("You are given the legal documents in a civil rights lawsuit")
        assert text.endswith("\n\nNow please summarize the case. Summary:")
    two = target.tokenizer.decode(task.encode(rows[2], target.tokenizer, max_tokens=9).ids)
    assert "Legal documents:\n" + "c" * 600 + "\n\nd" in two
    assert two.endswith("d\n\nNow please summarize the case. Summary:")  # where the prompt is full
    found = suite.summary({})
    assert "documents with answers of 8 tokens, the end of text ignored" in found.notes
    assert found.title == "Variant of Acceptance on Multi-LexSum"


def test_books_are_gone_on_with_after_their_first_pages(target, tmp_path):
    (tmp_path / "book.txt").write_text("t" * 8000 + "b" * 1000)
    suite = corpus(target, tmp_path / "book.txt", tasks=["pg19"], lengths=[512], limit=1)
    (task,) = suite.tasks
    ids = task.encode(next(task.examples()), target.tokenizer, max_tokens=9).ids
    assert target.tokenizer.decode(ids[1:]) == "b" * 511
    assert task.settings()["protocol"] == {"lengths": [512], "skip_tokens": 8000}


def test_without_lengths_documents_have_quantspecs_that_fit(target, tmp_path, monkeypatch):
    book = documents.CORPORA["pg19"]
    monkeypatch.setitem(documents.CORPORA, "pg19", replace(book, lengths=(1024, 2040, 2041)))
    (tmp_path / "book.txt").write_text("t" * 11000)
    suite = corpus(target, tmp_path / "book.txt", tasks=["pg19"], lengths=None)
    assert [row.fields["length"] for row in suite.tasks[0].examples()] == [1024, 2040]
    monkeypatch.setitem(documents.CORPORA, "pg19", replace(book, lengths=(2041,)))
    with pytest.raises(ConfigError, match="allowed: up to 2040 beside 8 new tokens"):
        corpus(target, tmp_path / "book.txt", tasks=["pg19"], lengths=None)


def test_both_papers_tasks_in_one_run_are_a_variant(target, data, lawsuits):
    suite = build(target, data, **{**DOCUMENTS, "tasks": ["multi_lexsum", "lcc"], "documents": str(lawsuits)})
    assert [task.name for task in suite.tasks] == ["multi_lexsum", "lcc"]  # as they were given
    found = suite.summary({})
    assert found.title == f"Variant of {speculation.PUBLISHED.title}"
    assert "tasks of LongSpec and of QuantSpec together" in found.notes


def test_documents_are_run_and_timed_by_length(target, lawsuits, systems):
    suite = corpus(target, lawsuits)
    records = run(target, suite, systems[1])["multi_lexsum"]
    assert [record.prompt_tokens for record in records] == [1024, 1024, 600, 600]
    assert all(record.output_tokens == 8 and not record.cut for record in records)
    by_length = suite.summary({"multi_lexsum": records}).extra["acceptance"]["multi_lexsum"]["by_length"]
    assert list(by_length) == ["600", "1024"]
    timed = SpeedTest(target, systems, suite, Sampling(), prompts=1).rows()
    assert [(row["length"], row["prompts"]) for row in timed] == [(600, 1), (1024, 1)]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lengths": [600, 2045]}, ConfigError, "allowed: up to 2040 beside 8 new tokens"),
        ({"lengths": [600, 1900], "limit": 3}, None, "2 of 3 prompts of multi_lexsum at 1900 tokens"),
        ({"documents": "/no/where"}, ConfigError, "no text at /no/where"),
        (
            {"documents_max_new_tokens": 1},
            ConfigError,
            "suite.documents_max_new_tokens=1; allowed: 2 or more",
        ),
        ({"limit": 0}, ConfigError, "suite.limit=0"),
    ],
)
def test_lengths_and_text_are_checked(target, lawsuits, settings, error, message):
    if error is None:
        assert message in corpus(target, lawsuits, **settings).summary({}).notes
        return
    with pytest.raises(error, match=message):
        corpus(target, lawsuits, **settings)


def test_no_document_long_enough_and_rows_without_the_field(target, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"sources": ["short"]}\n')
    with pytest.raises(DataError, match=r"no document at .* fills a prompt of 600 tokens"):
        corpus(target, path)
    path.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1 has no column 'sources'"):
        corpus(target, path)


def test_what_has_no_draft_is_told_in_every_title_block(target, data, systems):
    suite = build(target, data, tasks=["lcc"])
    evictor = System("snapkv@48", "policy", "snapkv", budget="48")

    def notes(*some):
        usual = suite.summary({"lcc": []}).notes
        return [note for note in suite.meet(suite, some).summary({"lcc": []}).notes if note not in usual]

    assert notes(*systems) == []
    assert notes(*systems, evictor) == ["snapkv@48 has no draft: its acceptance length has no meaning here"]
    (first,) = notes(systems[0], evictor)
    assert first.startswith("no system here has a draft") and "method=quantspec" in first
