"""AIME 2024 as a suite: what is asked, how it is scored, and how long a solution may be."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.suites import aime24


def write(path, count: int = 30):
    rows = [{"id": 60 + i, "problem": f"Find $x_{{{i}}}$.", "answer": f"{i:03d}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def build(tiny, settings_of, tmp_path):
    data = write(tmp_path / "aime.jsonl")

    def make(sampling=Sampling(), **changed):  # noqa: B008 (frozen)
        settings = settings_of("aime24", **{"data": data, **changed})
        return aime24.build(settings, tiny, seed=0, sampling=sampling)

    return make


@pytest.fixture
def as_published(build, tiny, monkeypatch):
    """The problems of these tests count as the published ones, and the window holds their solutions."""
    digest = aime24.fingerprint(build().tasks[0].rows)
    monkeypatch.setattr(aime24, "PUBLISHED", replace(aime24.PUBLISHED, sha256={aime24.NAME: digest}))
    monkeypatch.setattr(tiny, "info", replace(tiny.info, max_positions=65536))


def nothing(task, one) -> str:
    return ""


def test_all_of_it(build, as_published, tiny, answered) -> None:
    suite = build()
    (task,) = suite.tasks
    one = task.rows[7]
    asks = "Please reason step by step, and put your final answer within \\boxed{}."
    assert task.prompt(one) == f"Find $x_{{7}}$.\n\n{asks}"
    ids = task.encode(one, tiny.tokenizer, max_tokens=1000).ids
    assert tiny.tokenizer.decode(ids) == f"<|user|>{task.prompt(one)}<|assistant|>"
    assert (one.id, task.references(one), task.max_new_tokens) == ("67", ["7"], 32768)
    summary = suite.summary(answered(suite, lambda task, one: f"It is \\boxed{{{one.fields['answer']}}}."))
    assert summary.title == "AIME 2024" and summary.notes == ("solutions of up to 32768 tokens",)
    assert summary.tasks == {"aime24": 100.0}
    assert build(Sampling(0.0, top_p=0.5)).summary(answered(suite, nothing)).title == "AIME 2024"
    drawn = build(Sampling(0.9), max_new_tokens=40000)
    assert drawn.summary(answered(drawn, nothing)).notes == (
        "suite.max_new_tokens=40000 instead of 32768",
        "sampled (temperature 0.9), not greedy",
    )
    third = suite.summary(answered(suite, lambda task, one: f"{one.fields['answer'] // 10 * 10}"))
    assert third.average == 10.0  # 0, 10 and 20 of 30


def test_thinking_is_a_setting(build, tiny, monkeypatch) -> None:
    template = "{{ messages[0]['content'] }}{% if not enable_thinking %}<think></think>{% endif %}"
    monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
    texts, settings = [], []
    for thinking in (True, False):
        (task,) = build(thinking=thinking, max_new_tokens=10).tasks
        texts.append(tiny.tokenizer.decode(task.encode(task.rows[0], tiny.tokenizer, max_tokens=10).ids))
        settings.append(task.settings())
    assert [text.endswith("<think></think>") for text in texts] == [False, True]
    assert settings[0] != settings[1]


def test_solutions_end_with_the_window(build, tiny, answered) -> None:
    suite = build()
    (task,) = suite.tasks
    longest = max(len(task.encode(one, tiny.tokenizer, max_tokens=10**6).ids) for one in task.rows)
    assert tiny.info.max_positions - 40 < task.max_new_tokens + longest < tiny.info.max_positions
    summary = suite.summary(answered(suite, lambda task, one: ""))
    assert summary.title == "Variant of AIME 2024" and "before the 32768 asked for" in summary.notes[1]
    few = build(limit=3, max_new_tokens=10, chat=False)
    assert few.summary(answered(few, lambda task, one: "")).notes == (
        "3 of 30 rows of aime24",
        "suite.max_new_tokens=10 instead of 32768",
        "without chat template",
    )


def test_other_problems_do_not_bear_the_name(build, as_published, answered, tmp_path) -> None:
    def called(rows) -> tuple[str, str]:
        file = tmp_path / "other.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        suite = build(data=str(file))
        summary = suite.summary(answered(suite, nothing))
        return summary.title, summary.notes[0]

    rows = [json.loads(line) for line in (tmp_path / "aime.jsonl").read_text().splitlines()]
    spaced = [{**row, "problem": row["problem"].replace(" ", "  ")} for row in reversed(rows)]
    assert called(spaced)[0] == "AIME 2024"
    wrong = ("Variant of AIME 2024", "rows of aime24 that are not the published ones")
    assert called([*rows[1:], {**rows[0], "answer": "999"}]) == wrong
    assert called([*rows[1:], {**rows[0], "problem": "Find $y$."}]) == wrong


def test_a_thought_that_the_prompt_opens_holds_no_answer(build, tiny, monkeypatch) -> None:
    (plain,) = build(max_new_tokens=10).tasks
    template = "{{ messages[0]['content'] }}<assistant>{% if enable_thinking %}<think>\n{% endif %}"
    monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
    one = plain.rows[7]
    cut, whole = "so \\boxed{7}? wait", "so \\boxed{8}? wait</think>\\boxed{7}"
    for thinking, expected in ((True, 0.0), (False, 1.0)):
        (task,) = build(max_new_tokens=10, thinking=thinking).tasks
        assert (task.score(cut, one), task.score(whole, one)) == (expected, 1.0)
        assert task.settings()["protocol"]["prompt_opens_thoughts"] is thinking
    assert plain.score(cut, one) == 1.0


def test_the_target_solves_nothing_yet(build, tiny, run_suite) -> None:
    suite = build(limit=2, max_new_tokens=12)
    records = run_suite(suite, tiny)["aime24"]
    assert [record.example for record in records] == ["60", "61"]
    assert all(0 < record.output_tokens <= 12 and not record.cut for record in records)


def test_problems_of_other_columns(tiny, settings_of, tmp_path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"question": "1+1?", "answer": 2}]))
    (one,) = aime24.problems(str(file))
    assert dict(one.fields) == {"problem": "1+1?", "answer": 2} and one.id == "1"
    for row, message in (
        ({"answer": "2"}, "row 1: field 'problem'"),
        ({"problem": "x"}, "rows.json:1: field 'answer' is missing"),
        ({"problem": "x", "answer": "two"}, "answer 'two'; allowed: a whole number from 0 to 999"),
        ({"problem": "x", "answer": 1000}, "answer 1000"),
        ({"problem": "x", "answer": True}, "field 'answer' is a bool"),
    ):
        file.write_text(json.dumps([row]))
        with pytest.raises(DataError, match=message):
            aime24.problems(str(file))
    file.write_text("[]")
    with pytest.raises(DataError, match="holds no row"):
        aime24.problems(str(file))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"data": "HuggingFaceH4/aime_2024"},
            DataError,
            "data set .* could not be read from the Hub",
        ),
        ({"data": "/nowhere.jsonl"}, ConfigError, "AIME 2024 data at /nowhere.jsonl"),
        ({"max_new_tokens": 0}, ConfigError, "suite.max_new_tokens=0"),
        ({"limit": -1}, ConfigError, "suite.limit=-1"),
    ],
)
def test_settings_that_cannot_be(build, changed, error, message: str) -> None:
    with pytest.raises(error, match=message):
        build(**changed)
