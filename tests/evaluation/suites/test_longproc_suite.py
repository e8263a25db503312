"""LongProc's html_to_tsv as a suite: rows with prompts, LongProc's own files, and wrong ones."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace

import pytest
import yaml

from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.suites import longproc
from longtrain.evaluation.task import rows_sha256

TABLE = "name\tprice\nThe Cat\t$5\nDog\t7"
PAGE = "<html><li>The {Cat} $5</li><li>Dog 7</li></html>"
TEMPLATE = "Page: {html_str}\nAbout {task_topic}: {task_description}{filtering_instruction}\n{tsv_header}"


def row(number: int, group: str = "0.5k", **changed):
    return {
        "output_length_group": group,
        "task_id": f"W{number}",
        "gt": TABLE,
        "prompt": f"{PAGE}\nWrite a table of {number}.",
        **changed,
    }


@pytest.fixture
def folder(tmp_path):
    rows = {"0.5k": 100, "2k": 189, "8k": 120}
    for group, count in rows.items():
        lines = "".join(json.dumps(row(number, group)) + "\n" for number in range(count))
        with lzma.open(tmp_path / f"longproc_html_to_tsv_{group}.jsonl.xz", "wt") as file:
            file.write(lines)
    return tmp_path


@pytest.fixture
def build(tiny, settings_of, folder):
    def make(sampling=Sampling(), **changed):  # noqa: B008 (frozen)
        settings = settings_of("longproc", **{"data": str(folder), **changed})
        return longproc.build(settings, tiny, seed=0, sampling=sampling)

    return make


@pytest.fixture
def as_published(build, monkeypatch):
    """The rows of these tests count as the published ones."""
    (task,) = build(groups=["0.5k"]).tasks
    known = replace(longproc.PUBLISHED, sha256={task.name: rows_sha256(task.rows)})
    monkeypatch.setattr(longproc, "PUBLISHED", known)


def test_all_of_it(build, as_published, answered) -> None:
    suite = build()
    assert {task.name: task.max_new_tokens for task in suite.tasks} == {
        "html_to_tsv_0.5k": 1024,
        "html_to_tsv_2k": 3072,
        "html_to_tsv_8k": 9216,
    }
    (task, *_) = suite.tasks
    one = next(task.examples())
    assert task.prompt(one) == f"{PAGE}\nWrite a table of 0." and task.references(one) == [TABLE]
    summary = suite.summary(answered(suite, lambda task, one: f"Here:\n```tsv\n{TABLE}\n```\nDone."))
    unverified = ("the examples of 2k and 8k are not compared with the published ones, those of 0.5k are",)
    assert (summary.title, summary.notes, summary.average) == ("LongProc html_to_tsv", unverified, 100.0)


def test_other_rows_do_not_bear_the_name(build, answered) -> None:
    suite = build()
    summary = suite.summary(answered(suite, lambda task, one: ""))
    assert summary.title == "Variant of LongProc html_to_tsv"
    assert summary.notes[0] == "examples of html_to_tsv_0.5k that are not the published ones"


def test_half_the_rows_of_a_table_are_worth_two_thirds(build, answered) -> None:
    suite = build(groups=["0.5k"], limit=2)
    (task,) = suite.tasks
    half, none = task.rows
    answers = {half.id: "```tsv\nname\tprice\nthe 'cat'\t5\n```", none.id: "I do not know."}
    summary = suite.summary(answered(suite, lambda task, one: answers[one.id]))
    assert summary.tasks == {"html_to_tsv_0.5k": 33.33}  # precision 1, recall 1/2, F1 2/3; and nothing
    assert summary.title == "Variant of LongProc html_to_tsv"
    assert summary.notes == ("1 of 3 tasks", "2 of 100 examples of html_to_tsv_0.5k")


def test_the_target_reads_it(build, tiny, run_suite, monkeypatch) -> None:
    monkeypatch.setitem(longproc.MAX_NEW_TOKENS, "0.5k", 8)
    suite = build(groups=["0.5k"], limit=2, max_prompt_tokens=20)
    records = run_suite(suite, tiny)
    assert all(record.cut and len(record.turns[0].tokens) <= 8 for record in records["html_to_tsv_0.5k"])
    assert "2 of 2 prompts cut to 20 tokens" in suite.summary(records).notes


def test_longprocs_own_files_are_filled(tiny, settings_of, tmp_path) -> None:
    place = tmp_path / "html_to_tsv"
    (place / "webpage").mkdir(parents=True)
    (place / "webpage" / "a.html").write_text(PAGE)
    fields = {
        "html_path": "webpage/a.html",
        "task_topic": "Pets",
        "task_description": "(1) Name",
        "tsv_header": "name",
        "filtering_instruction": " Only cats.",
    }
    own = {key: value for key, value in row(1, **fields).items() if key != "prompt"}
    (place / "html_to_tsv_0.5k.json").write_text(json.dumps([own]))
    settings = settings_of("longproc", data=str(tmp_path), groups=["0.5k"])
    with pytest.raises(DataError, match=r"W1 has no 'prompt', and .*prompts.yaml to fill one is missing"):
        longproc.build(settings, tiny, seed=0, sampling=Sampling())
    (place / "prompts.yaml").write_text(yaml.safe_dump({"USER_PROMPT": TEMPLATE + "{year}"}))
    with pytest.raises(DataError, match=r"prompts.yaml .*'year'"):
        longproc.build(settings, tiny, seed=0, sampling=Sampling())
    (place / "prompts.yaml").write_text(yaml.safe_dump({"USER_PROMPT": TEMPLATE}))
    (task,) = longproc.build(settings, tiny, seed=0, sampling=Sampling()).tasks
    assert task.prompt(task.rows[0]) == f"Page: {PAGE}\nAbout Pets: (1) Name Only cats.\nname"
    (place / "html_to_tsv_0.5k.json").write_text(json.dumps([{**own, "html_path": None}]))
    with pytest.raises(DataError, match="W1 has neither 'prompt' nor a text 'html_path'"):
        longproc.build(settings, tiny, seed=0, sampling=Sampling())


def test_one_file_may_hold_several_groups(tiny, settings_of, tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row(i, "2k" if i > 2 else "0.5k")) + "\n" for i in range(5)))
    settings = settings_of("longproc", data=str(file), groups=["0.5k", "2k"])
    suite = longproc.build(settings, tiny, seed=0, sampling=Sampling())
    assert [len(task.rows) for task in suite.tasks] == [3, 2]
    with pytest.raises(DataError, match=r"of the output length 0.5k, 2k and none of 8k; pass suite.groups="):
        longproc.build({**settings, "groups": ["8k"]}, tiny, seed=0, sampling=Sampling())


def test_rows_that_do_not_say_their_group_are_of_one_alone(tiny, settings_of, tmp_path) -> None:
    rows = [row(i) for i in range(3)]
    for one in rows:
        del one["output_length_group"]
    file = tmp_path / "tables_2k.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))

    def tasks(groups):
        settings = settings_of("longproc", data=str(file), groups=groups)
        return longproc.build(settings, tiny, seed=0, sampling=Sampling()).tasks

    for groups in ([], ["0.5k", "2k"]):
        with pytest.raises(DataError, match=r"without the field 'output_length_group'.*suite.groups=\[2k\]"):
            tasks(groups)
    (task,) = tasks(["2k"])
    assert (task.name, len(task.rows)) == ("html_to_tsv_2k", 3)


def test_a_folder_without_a_group_says_which_there_are(build, folder) -> None:
    (folder / "longproc_html_to_tsv_2k.jsonl.xz").unlink()
    (folder / "longproc_html_to_tsv_8k.jsonl.xz").unlink()
    with pytest.raises(
        DataError, match=r"one html_to_tsv_2k.json or .jsonl, it has none; pass suite.groups=\[0.5k\]"
    ):
        build()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"data": None}, ConfigError, "suite.data=null.*princeton-pli/LongProc"),
        ({"data": "/nowhere"}, ConfigError, "LongProc html_to_tsv data at /nowhere: nothing there"),
        ({"data": "hub:a/b"}, ConfigError, "'hub:a/b' names no file"),
        ({"data": "hub:a/b/c.jsonl"}, DataError, "c.jsonl of data set a/b could not be fetched"),
        ({"groups": ["1k"]}, ConfigError, r"suite.groups=\['1k'\]; allowed: each once of 0.5k, 2k, 8k"),
        ({"max_prompt_tokens": 9000}, ConfigError, "suite.max_prompt_tokens=9000; allowed: up to 7"),
    ],
)
def test_settings_that_cannot_be(build, changed, error, message: str) -> None:
    with pytest.raises(error, match=message):
        build(**changed)


def test_rows_that_are_wrong(tiny, settings_of, tmp_path) -> None:
    file = tmp_path / "html_to_tsv_0.5k.jsonl"
    settings = settings_of("longproc", data=str(tmp_path), groups=["0.5k"])
    for fields, message in (
        ({"gt": 3}, r"html_to_tsv_0.5k.jsonl:2: field 'gt' is an int; it must be str"),
        ({"prompt": ""}, "the prompt of W1 is ''"),
    ):
        file.write_text("".join(json.dumps(one) + "\n" for one in (row(0), row(1, **fields))))
        with pytest.raises(DataError, match=message):
            longproc.build(settings, tiny, seed=0, sampling=Sampling())
    file.write_text(json.dumps(row(0)) + "\n" + json.dumps(row(0)) + "\n")
    assert [
        one.id for one in longproc.build(settings, tiny, seed=0, sampling=Sampling()).tasks[0].examples()
    ] == ["W0", "W0#2"]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "html_to_tsv_0.5k.json").write_text("[]")
    with pytest.raises(DataError, match=r"must hold one html_to_tsv_0.5k"):
        longproc.build(settings, tiny, seed=0, sampling=Sampling())
