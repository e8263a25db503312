"""What results of suites for drafts are called: every departure from the paper's runs makes a variant."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from byte_target import byte_target

from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.records import Record
from longtrain.evaluation.suites import documents, speculation


@pytest.fixture(scope="module")
def target():
    return byte_target(begin=True)


@pytest.fixture
def build(target, settings_of, tmp_path, monkeypatch):
    """All rows of all tasks; prompts and answers as short as the target's window needs."""
    row = {"input": "q", "answers": ["a"], "length": 3, "language": "en", "all_classes": None}
    for name in speculation.LONG:
        rows = [row | {"context": f"{i}" * 500, "dataset": name, "_id": f"{name}{i}"} for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = tmp_path / "aime.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"{i}?", "answer": i}) + "\n" for i in range(30)))
    short = {"max_new_tokens": 12, "min_prompt_tokens": 400, "aime24_max_new_tokens": 10}
    known = replace(
        speculation.PUBLISHED,
        tasks={**dict.fromkeys(speculation.LONG, 2), "aime24": 30},
        sha256={"aime24": speculation.fingerprint(speculation.problems(str(problems)))},
        settings={**speculation.PUBLISHED.settings, **short},
    )
    monkeypatch.setattr(speculation, "PUBLISHED", known)
    own = {"data": str(tmp_path), "aime24": str(problems), "lengths": None}
    own |= {"max_new_tokens": 12, "aime24_max_new_tokens": 10, "ignore_eos": True}

    def make(**changed):
        settings = settings_of("speculation", **{**own, "min_prompt_tokens": 400, **changed})
        return speculation.build(settings, target, seed=0, sampling=Sampling())

    return make


def test_all_of_it_bears_the_name(build) -> None:
    assert build().summary({}).title == speculation.PUBLISHED.title


def test_rows_missing_other_problems_and_cut_prompts(build, tmp_path) -> None:
    cut = [Record("full", "lcc", str(i), {"length": 1024}, cut=i < 2) for i in range(3)]
    found = build().summary({"lcc": cut})
    assert found.title.startswith("Variant of") and found.notes[0] == "2 of 3 prompts cut in the middle"
    lines = (tmp_path / "lcc.jsonl").read_text().splitlines()
    (tmp_path / "lcc.jsonl").write_text(lines[0])
    (tmp_path / "other.jsonl").write_text('{"problem": "x", "answer": 1}\n' * 30)
    found = build(aime24=str(tmp_path / "other.jsonl")).summary({})
    assert found.notes[:2] == ("1 of 2 examples of lcc", "examples of aime24 that are not the published ones")


def test_documents_are_quantspecs_or_a_variant(target, settings_of, monkeypatch) -> None:
    monkeypatch.setattr(
        documents.corpora, "texts", lambda *_, **__: iter([(f"{i}", "abc " * 3000) for i in range(11)])
    )
    for name, like in (("pg19", "pg19_test"), ("infbench_sum", "infbench_sum")):
        corpus = documents.Corpus(f"Acceptance on {name}", like, (1024,), 9)
        monkeypatch.setitem(documents.CORPORA, name, corpus)

    def found(sampling=Sampling(), **changed):  # noqa: B008 (frozen)
        usual = {"tasks": ["pg19"], "lengths": None, "ignore_eos": True}
        settings = settings_of("speculation", **{**usual, **changed})
        return speculation.build(settings, target, seed=0, sampling=sampling).summary({})

    assert (found().title, len(found().notes)) == ("Acceptance on pg19", 1)
    assert found(Sampling(0.5)).notes[-1] == "sampled (temperature 0.5), not greedy"
    both = found(tasks=["pg19", "infbench_sum"])
    assert (both.title, len(both.notes)) == ("Acceptance on long documents", 1)
    changed = {"documents": "books", "lengths": [1000, 1024], "limit": 3, "documents_max_new_tokens": 8}
    variant = found(**changed, ignore_eos=False)
    assert (variant.title, variant.notes[:5]) == (
        "Variant of Acceptance on pg19",
        (
            "lengths that are not published: 1000",
            "suite.documents=books instead of null",
            "suite.limit=3 instead of null",
            "suite.documents_max_new_tokens=8 instead of 90",
            "suite.ignore_eos=false instead of true",
        ),
    )
