"""LongBench as a suite: whole or a variant, cut or not, and rows that are wrong."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace

import pytest

from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.evaluation import longbench_rows as files
from longtrain.evaluation.harness.protocol import prompt_room, protocol_of
from longtrain.evaluation.suites import longbench
from longtrain.evaluation.suites.longbench import NAMES, SPECS


def row(name: str, number: int, words: int = 4):
    return {
        "input": "Who?",
        "context": " ".join(f"w{i + number}" for i in range(words)),
        "answers": ["Paragraph 7"],
        "length": words,
        "dataset": name,
        "language": "en",
        "all_classes": ["Paragraph 7", "Paragraph"] if name == "trec" else None,
        "_id": hashlib.sha256(f"{name}-{number}".encode()).hexdigest()[:48],
    }


def write(folder, name: str, rows) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(fields) + "\n" for fields in rows)
    (folder / f"{name}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As many rows of each task as were published."""
    made = tmp_path_factory.mktemp("longbench")
    for name in NAMES:
        write(made, name, [row(name, number) for number in range(SPECS[name].rows)])
    return made


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """What is published of the rows that these tests write."""
    marks = {name: [files.answer_mark(name, ["Paragraph 7"])] for name in NAMES}
    monkeypatch.setattr(files, "DATA", {"answers": marks, "mean_words": dict.fromkeys(NAMES, 7)})


@pytest.fixture
def build(tiny, settings_of, folder):
    def make(sampling=Sampling(), **changed):  # noqa: B008 (frozen)
        settings = settings_of("longbench", **{"data": str(folder), **changed})
        return longbench.build(settings, tiny, seed=0, sampling=sampling)

    return make


def test_all_of_it_bears_the_name(build, answered) -> None:
    suite = build()
    assert [task.name for task in suite.tasks] == list(NAMES)
    assert sum(len(task.rows) for task in suite.tasks) == 3750
    assert [task.chat for task in suite.tasks] == [SPECS[name].chat for name in NAMES]
    summary = suite.summary(answered(suite, lambda task, one: "Paragraph 7"))
    assert (summary.title, summary.notes, summary.extra["whole"]) == ("LongBench", (longbench.COPY,), True)
    assert summary.tasks == {**dict.fromkeys(NAMES, 100.0), "passage_count": 0.0}  # "7" is not "Paragraph 7"
    assert summary.average == 93.75
    (task, *_) = suite.tasks
    assert task.references(task.rows[0]) == ["Paragraph 7"]


def test_less_of_it_is_a_variant(build, answered) -> None:
    few = build(tasks=["trec", "qasper"], limit=3)
    summary = few.summary(answered(few, lambda task, one: ""))
    assert summary.title == "Variant of LongBench" and summary.average == 0.0
    assert summary.notes == ("2 of 16 tasks", "6 of 400 examples of trec, qasper")
    plain = build(chat=False)
    assert not any(task.chat for task in plain.tasks)
    summary = plain.summary(answered(plain, lambda task, one: ""))
    assert (summary.title, summary.notes) == ("Variant of LongBench", ("without chat template",))


def test_rows_that_are_not_recognised_make_a_variant(build, answered, monkeypatch) -> None:
    monkeypatch.setattr(files, "DATA", {**files.DATA, "mean_words": dict.fromkeys(NAMES, 4000)})
    suite = build()
    summary = suite.summary(answered(suite, lambda task, one: ""))
    first = "examples of narrativeqa have 7 words on average, published 4000"
    note = f"examples that are not recognised as the published ones: {first} and 15 more signs"
    assert (summary.title, summary.notes) == ("Variant of LongBench", (note,))


def test_a_row_under_two_names_is_said(build, answered, tmp_path) -> None:
    for name in NAMES:
        rows = [row(name, number) for number in range(SPECS[name].rows - 1)]
        write(tmp_path / "twice", name, [*rows, {**rows[0], "_id": "0" * 48}])
    suite = build(data=str(tmp_path / "twice"))
    summary = suite.summary(answered(suite, lambda task, one: ""))
    assert (summary.title, summary.notes) == (
        "Variant of LongBench",
        ("examples that repeat an earlier one: 16",),
    )


def test_the_authors_own_rows_need_no_note(build, answered, folder, monkeypatch) -> None:
    zipped = folder / "data.zip"
    with zipfile.ZipFile(zipped, "w") as archive:
        for name in NAMES:
            archive.write(folder / f"{name}.jsonl", f"data/{name}.jsonl")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(zipped))
    for where, notes in (("THUDM/LongBench", ()), ("someone/LongBench", (longbench.COPY,))):
        suite = build(data=where)
        summary = suite.summary(answered(suite, lambda task, one: ""))
        assert (summary.title, summary.notes) == ("LongBench", notes)


def test_prompts_are_cut_to_what_was_asked_for(tiny, settings_of, tmp_path, run_suite) -> None:
    write(tmp_path, "trec", [row("trec", 0, words=900), row("trec", 1)])
    settings = settings_of("longbench", data=str(tmp_path), tasks=["trec"], max_prompt_tokens=300)
    suite = longbench.build(settings, tiny, seed=0, sampling=Sampling())
    records = run_suite(suite, tiny)
    assert [record.cut for record in records["trec"]] == [True, False]
    assert abs(records["trec"][0].prompt_tokens - 300) <= 2
    summary = suite.summary(records)
    assert summary.title == "Variant of LongBench"
    assert "1 of 2 prompts cut to 300 tokens" in summary.notes
    suite = longbench.build({**settings, "max_prompt_tokens": None}, tiny, seed=0, sampling=Sampling())
    room = prompt_room(suite.tasks[0], tiny)
    cut = {"trec": [replace(record, cut=True) for record in records["trec"]]}
    assert f"2 of 2 prompts cut to {room} tokens" in suite.summary(cut).notes
    suite = longbench.build(settings, tiny, seed=0, sampling=Sampling())
    assert (
        suite.tasks[0].settings()
        == longbench.build(settings, tiny, seed=5, sampling=Sampling()).tasks[0].settings()
    )


def test_what_the_protocol_pins(build, tiny, folder, tmp_path) -> None:
    small = {"tasks": ["trec", "lcc"], "limit": 5}
    rows = [row("trec", number) for number in range(5)]
    for place, changed in (("same", {}), ("other", {"input": "What?"})):
        write(tmp_path / place, "trec", [*rows[:4], {**rows[4], **changed}])
        write(tmp_path / place, "lcc", [row("lcc", number) for number in range(5)])

    def pinned(**changed) -> str:
        return protocol_of(build(**{**small, **changed}), tiny, Sampling()).hash

    assert pinned() == pinned() == pinned(data=str(tmp_path / "same"))
    others = (
        {"limit": 4},
        {"tasks": ["trec"]},
        {"max_prompt_tokens": 300},
        {"data": str(tmp_path / "other")},
    )
    assert len({pinned(), *(pinned(**changed) for changed in others)}) == 5
    assert pinned() == pinned(chat=False)  # neither task has a chat template
    assert pinned(tasks=["qasper"]) != pinned(tasks=["qasper"], chat=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": ["qaspr"]}, r"suite.tasks=\['qaspr'\]; allowed: each once of narrativeqa"),
        ({"tasks": ["lcc", "lcc"]}, "each once of narrativeqa"),
        ({"tasks": "lcc"}, "suite.tasks=lcc; allowed: each once of"),
        ({"limit": 0}, "suite.limit=0; allowed: a whole number, 1 or more, or null"),
        ({"max_prompt_tokens": 16384}, r"suite.max_prompt_tokens=16384; allowed: up to \d+"),
        ({"data": None}, "suite.data=null"),
        ({"data": "no/where/at/all"}, "LongBench data at no/where/at/all"),
        ({"chat": "often"}, "suite.chat=often; allowed: true or false"),
    ],
)
def test_settings_that_cannot_be(build, changed, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**changed)
