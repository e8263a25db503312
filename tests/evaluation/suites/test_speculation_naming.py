"""What results of suites for drafts are called: every departure from the paper's runs makes a variant."""

from __future__ import annotations

import json

import pytest
from byte_target import byte_target

from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.longbench import SPECS
from longtrain.evaluation.records import Record
from longtrain.evaluation.suites import aime24, documents, speculation


@pytest.fixture(scope="module")
def target():
    return byte_target(begin=True)


@pytest.fixture
def build(target, settings_of, tmp_path, monkeypatch):
    """All rows of all tasks; prompts and answers as short as the target's window needs."""
    row = {"input": "q", "answers": ["a"], "length": 3, "language": "en", "all_classes": None}
    for name in speculation.LONG:
        monkeypatch.setitem(SPECS, name, type(SPECS[name])(**{**vars(SPECS[name]), "rows": 2}))
        rows = [row | {"context": f"{i}" * 500, "dataset": name, "_id": f"{name}{i}"} for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = tmp_path / "aime.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"{i}?", "answer": i}) + "\n" for i in range(30)))
    monkeypatch.setattr(aime24, "PUBLISHED", aime24.fingerprint(aime24.problems(str(problems))))
    monkeypatch.setattr(aime24, "MAX_NEW_TOKENS", 10)
    monkeypatch.setattr(speculation, "NEW_TOKENS", 12)
    monkeypatch.setattr(speculation, "LEAST_TOKENS", 400)
    own = {"data": str(tmp_path), "aime24": str(problems), "max_new_tokens": 12, "aime24_max_new_tokens": 10}

    def make(**changed):
        settings = settings_of("speculation", **{**own, "min_prompt_tokens": 400, **changed})
        return speculation.build(settings, target, seed=0, sampling=Sampling())

    return make


def test_all_of_it_bears_the_name(build) -> None:
    assert build().summary({}).title == speculation.TITLE


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        ({"tasks": ["lcc", "aime24"]}, "2 of 6 tasks"),
        ({"limit": 1}, "the first 1 prompts of each task"),
        ({"min_prompt_tokens": 0}, "prompts of more than 0 tokens instead of 400"),
        ({"ignore_eos": False}, "answers end where the text does"),
        ({"chat": False}, "without chat template"),
        ({"max_new_tokens": 8}, "answers of 8 tokens instead of 12"),
        ({"aime24_max_new_tokens": 8}, "AIME 2024: solutions of 8 tokens instead of 10"),
    ],
)
def test_less_of_it_is_a_variant(build, changed, note: str) -> None:
    found = build(**changed).summary({})
    assert found.title == f"Variant of {speculation.TITLE}" and note in found.notes


def test_rows_missing_other_problems_and_cut_prompts(build, tmp_path) -> None:
    cut = [Record("full", "lcc", str(i), {"length": 1024}, cut=i < 2) for i in range(3)]
    found = build().summary({"lcc": cut})
    assert found.title.startswith("Variant of") and found.notes[0] == "prompts cut in the middle: 2"
    lines = (tmp_path / "lcc.jsonl").read_text().splitlines()
    (tmp_path / "lcc.jsonl").write_text(lines[0])
    (tmp_path / "other.jsonl").write_text('{"problem": "x", "answer": 1}\n' * 30)
    found = build(aime24=str(tmp_path / "other.jsonl")).summary({})
    assert found.notes[:2] == ("1 of 2 rows of lcc", "AIME 2024: problems or answers are not those published")


def test_documents_are_quantspecs_or_a_variant(target, settings_of, monkeypatch) -> None:
    monkeypatch.setattr(
        documents.corpora, "texts", lambda *_, **__: iter([(f"{i}", "abc " * 3000) for i in range(11)])
    )
    monkeypatch.setitem(
        documents.CORPORA, "pg19", documents.Corpus("Acceptance on PG-19", "pg19_test", (1024,), 9)
    )

    def found(sampling=Sampling(), **changed):  # noqa: B008 (frozen)
        settings = settings_of("pg19", **{"lengths": [1024], "skip_tokens": 9, **changed})
        return documents.build(settings, target, seed=0, sampling=sampling).summary({})

    assert (found().title, len(found().notes)) == ("Acceptance on PG-19", 1)
    assert found(Sampling(0.5)).notes[-1] == "sampled (temperature 0.5), not greedy"
    for changed, note in (
        ({"data": "books"}, "documents of a copy or of another text, not read as the corpus pg19_test"),
        ({"lengths": [1000, 1024]}, "prompts of 1000 tokens (QuantSpec: 1024)"),
        ({"prompts": 3}, "prompts of each length: 3 instead of 11"),
        ({"skip_tokens": 0}, "tokens skipped at the beginning: 0 instead of 9"),
        ({"max_new_tokens": 8}, "new tokens: 8 instead of 90"),
        ({"ignore_eos": False}, "answers end where the text does"),
        ({"chat": True}, "in the target's chat template (QuantSpec has none)"),
    ):
        variant = found(**changed)
        assert (variant.title, variant.notes[-1]) == ("Variant of Acceptance on PG-19", note)
