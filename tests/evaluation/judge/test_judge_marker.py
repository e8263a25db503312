"""Marking: every judgement kept as it comes, nothing asked twice, nothing invented."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judge_server import Answer, Judge, in_turn, serve

from longtrain.evaluation.harness.ledger import Ledger
from longtrain.evaluation.judge.client import JudgeError, JudgeSettings
from longtrain.evaluation.judge.marker import EMPTY, UNREADABLE, JudgeMarker, judge_facts, marks_of
from longtrain.evaluation.judge.prompts import JudgePrompts, longbench_write_prompts, mt_bench_prompts
from longtrain.evaluation.judge.rubrics import DIMENSIONS, LongWriteRubric, MtBenchRubric
from longtrain.evaluation.records import Record, Turn
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Task

ROWS = tuple(
    Example(str(i), {"question_id": i, "category": "writing", "turns": [f"Question {i}?", "And?"]})
    for i in range(6)
)
SUITE = Suite("mtbench", (Task("mt_bench", ROWS, "{turns}", 8, "judge", None, n_turns=2),))


def record(system: str, row: Example, *answers: str) -> Record:
    turns = tuple(Turn(text, (1, 2), "stop_id", 5, 5.0) for text in answers)
    return Record(system, "mt_bench", row.id, {"category": "writing"}, turns=turns)


def records_of(*systems: str) -> list[Record]:
    return [record(name, row, f"{name} {row.id} a", f"{name} {row.id} b") for name in systems for row in ROWS]


def marker(url: str, *, tries: int = 2, **values: Any) -> JudgeMarker:
    fast = {"retries": 1, "timeout_s": 5.0, "concurrency": 3}
    return JudgeMarker(
        JudgeSettings(url, "judge", tries=tries, **{**fast, **values}), MtBenchRubric(mt_bench_prompts(), {})
    )


class Desk:
    """Where a test's marking happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told = 0

    def mark(self, marker: JudgeMarker, records: list[Record]) -> list[Record]:
        self.told = 0
        return marker.mark(records, SUITE, lambda name, s: Ledger(self.folder, name, s), self.advance)

    def advance(self, what: str, done: int) -> None:
        self.told += done

    def kept(self) -> list[dict[str, Any]]:
        lines = [line for path in self.folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        return [json.loads(line)["payload"] for line in lines if "payload" in line]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def rating_of(text: str) -> Callable[[dict[str, Any], int], Answer]:
    """9 for questions that hold a text, else 3."""

    def answer(body: dict[str, Any], _: int) -> Answer:
        return Answer("Rating: [[9]]" if text in json.dumps(body) else "Rating: [[3]]")

    return answer


def test_marks_reach_the_right_records(desk: Desk) -> None:
    records = records_of("full", "snapkv")
    with serve(rating_of("full 4 b")) as judge:
        marked = desk.mark(end := marker(judge.url), records)
        assert end.count(records) == 24 == desk.told == len(judge.requests)
    assert [(one.system, one.example) for one in marked] == [(one.system, one.example) for one in records]
    for one in marked:
        second = 9.0 if (one.system, one.example) == ("full", "4") else 3.0
        assert marks_of(one) == [{"rating": 3.0}, {"rating": second}]
        assert one.score == pytest.approx((3.0 + second) / 20)
        assert one.texts == records[marked.index(one)].texts
    facts = judge_facts(end, marked)
    assert facts["judgements"] == 24
    assert facts["unjudged"] == 0
    assert facts["tries"] == 2
    assert end.course() == {"hosts": [end.judge.host], "judgements": 24, "asked_again": 0}
    said = json.dumps([one.marks for one in marked] + [facts])
    assert "127.0.0.1" not in said  # where a judge is changes from run to run, and no result with it
    assert facts["answered_as"] == ["judge-1"]
    assert facts["prompts"]["official"] is True
    assert facts["model"] == "judge"
    assert json.loads(json.dumps(facts)) == facts


def test_several_at_a_time_and_no_more(desk: Desk) -> None:
    with serve(lambda *_: Answer(delay_s=0.05)) as judge:
        desk.mark(marker(judge.url, concurrency=3), records_of("full"))
    assert judge.most_under_way == 3


def test_equal_answers_are_judged_once(desk: Desk) -> None:
    records = [record(system, row, "same", "again") for system in ("full", "draft") for row in ROWS]
    with serve(in_turn(Answer())) as judge:
        marked = desk.mark(marker(judge.url), records)
    assert len(judge.requests) == 12
    assert desk.told == 24
    assert all(one.score == pytest.approx(0.7) for one in marked)


def test_a_second_run_asks_nothing(desk: Desk) -> None:
    with serve(in_turn(Answer())) as judge:
        first = desk.mark(marker(judge.url), records_of("full"))
        second = desk.mark(marker(judge.url), records_of("full"))
    assert len(judge.requests) == 12
    assert first == second
    assert desk.told == 12


def test_nonsense_is_asked_again_and_then_left_unjudged(desk: Desk) -> None:
    def answer(body: dict[str, Any], _: int) -> Answer:
        return Answer("I like it a lot!" if "full 2 a" in json.dumps(body) else "[[5]]")

    with serve(answer) as judge:
        marked = desk.mark(end := marker(judge.url, tries=3), records_of("full"))
        assert len(judge.requests) == 10 + 2 * 3  # both turns of that question hold its first answer
        desk.mark(end, records_of("full"))
        assert len(judge.requests) == 16  # what stayed unjudged is not asked for ever by one run
    by_example = {one.example: one for one in marked}
    assert by_example["2"].score is None
    assert by_example["1"].score == 0.5
    facts = judge_facts(end, marked)
    assert (facts["unjudged"], facts["unjudged_reasons"]) == (2, {UNREADABLE: 2})
    assert facts["first_unjudged"] == "I like it a lot!"


@pytest.mark.parametrize(("missing", "asked"), [("Accuracy", 3), ("Reading Experience", 5)])
def test_a_reply_without_a_dimension_counts_as_officially(desk: Desk, missing: str, asked: int) -> None:
    """Twice of five tries, as the official loop counts it; once where the last dimension alone is missing."""
    reply = json.dumps({name: 4 for name in DIMENSIONS if name != missing})
    rows = (Example("1", {"prompt": "Write.", "type": "x", "length": 4}),)
    suite = Suite("longbench_write", (Task("mt_bench", rows, "{prompt}", 8, "judge", None),))
    with serve(in_turn(Answer(reply))) as judge:
        end = JudgeMarker(marker(judge.url, tries=5).judge, LongWriteRubric(longbench_write_prompts()))
        end.mark(
            [record("full", rows[0], "a")], suite, lambda name, s: Ledger(desk.folder, name, s), desk.advance
        )
        assert len(judge.requests) == asked


def test_nonsense_that_passes(desk: Desk) -> None:
    with serve(in_turn(Answer("hm"), Answer(""), Answer("[[8]]"))) as judge:
        marked = desk.mark(end := marker(judge.url, tries=3, concurrency=1), records_of("full"))
    assert {one.score for one in marked} == {0.8}
    assert end.course()["asked_again"] == 1
    assert len(judge.requests) == 14


def test_reasons_tell_what_to_change(desk: Desk) -> None:
    with serve(in_turn(Answer(None, finish="length"))) as judge:
        marked = desk.mark(end := marker(judge.url), records_of("full"))
    reasons = judge_facts(end, marked)["unjudged_reasons"]
    assert reasons == {f"{EMPTY} (cut off at suite.judge.max_tokens)": 12}


def test_refused_questions_are_counted_and_the_rest_goes_on(desk: Desk) -> None:
    said = b"This model's maximum context length is 10 tokens"

    def answer(body: dict[str, Any], _: int) -> Answer:
        return Answer(status=400, body=said) if "full 3 b" in json.dumps(body) else Answer()

    with serve(answer) as judge:
        marked = desk.mark(end := marker(judge.url), records_of("full"))
    assert marks_of(marked[3]) == [{"rating": 7.0}, None]
    assert marked[3].score == pytest.approx(0.7)
    assert judge_facts(end, marked)["unjudged_reasons"] == {"refused": 1}
    assert any("maximum context length" in (one["unjudged"] or "") for one in desk.kept())


def test_a_later_run_asks_again_and_says_so(desk: Desk) -> None:
    with serve(lambda body, _: Answer("hm") if "full 2 a" in json.dumps(body) else Answer("[[5]]")) as judge:
        first = desk.mark(one := marker(judge.url), records_of("full"))
        assert len(judge.requests) == 10 + 2 * 2
    with serve(in_turn(Answer("hm"), Answer("[[9]]"))) as judge:
        second = desk.mark(two := marker(judge.url, concurrency=1), records_of("full"))
        assert len(judge.requests) == 3  # the first question twice, the other once
    assert marks_of(first[2]) == [None, None]
    assert marks_of(second[2]) == [{"rating": 9.0}, {"rating": 9.0}]
    facts = [judge_facts(end, some) for end, some in ((one, first), (two, second))]
    assert [(some["unjudged"], some["late"]) for some in facts] == [(2, 0), (0, 2)]
    with serve(in_turn(Answer())) as judge:
        assert desk.mark(marker(judge.url), records_of("full")) == second
        patient = desk.mark(end := marker(judge.url, tries=4), records_of("full"))
        assert judge_facts(end, patient)["late"] == 0  # four tries would have had them at once
        assert not judge.requests
    assert end.settings() != two.settings()


def test_what_has_no_mark_needs_no_judge_to_be_shown(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    with serve(lambda body, _: Answer("hm") if "full 2 a" in json.dumps(body) else Answer("[[5]]")) as judge:
        first = desk.mark(marker(judge.url), records_of("full"))
    assert desk.mark(marker(judge.url, retries=0), records_of("full")) == first  # the server is gone
    assert "stays unjudged" in caplog.text
    with pytest.raises(JudgeError, match="12 of 24 judgements are kept"):
        desk.mark(marker(judge.url, retries=0), records_of("full", "snapkv"))


def test_what_was_refused_is_asked_again_by_the_next_run(desk: Desk) -> None:
    said = Answer(status=400, body=b"This model's maximum context length is 10 tokens")
    with serve(lambda body, _: said if "full 3 b" in json.dumps(body) else Answer()) as judge:
        end = marker(judge.url, tries=1)
        for _ in range(2):  # the same run marks some records first, then all
            desk.mark(end, records_of("full"))
        assert len(judge.requests) == 12
        desk.mark(marker(judge.url, tries=1), records_of("full"))
        assert len(judge.requests) == 13
    kept = len(desk.kept())
    assert kept == 12  # nothing new was said
    with serve(in_turn(Answer("[[4]]"))) as judge:  # its window has grown
        marked = desk.mark(marker(judge.url, tries=1), records_of("full"))
        assert len(judge.requests) == 1
    assert marks_of(marked[3]) == [{"rating": 7.0}, {"rating": 4.0}]
    assert judge_facts(end, marked)["unjudged"] == 0


def break_after(count: int, bad: Answer) -> Callable[[dict[str, Any], int], Answer]:
    return lambda _, number: Answer() if number < count else bad


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Answer(status=500, body=b"down"), r"status 500 \(down\) after 1 retries"),
        (Answer(delay_s=6.0), r"no answer within 3 s"),
        (Answer(status=401, body=b"key"), "key_env"),
        (Answer(stop=True), "no connection|no chat completion"),
    ],
    ids=["down", "slow", "key", "broken"],
)
def test_a_judge_that_breaks_down_loses_nothing(desk: Desk, bad: Answer, why: str) -> None:
    records = records_of("full")
    with serve(break_after(5, bad)) as judge:
        with pytest.raises(
            JudgeError, match=rf"(?s)({why}).*; 5 of 12 judgements are kept, the same command"
        ):
            desk.mark(marker(judge.url, timeout_s=3.0), records)
    assert len(desk.kept()) == 5
    with serve(in_turn(Answer())) as judge:  # elsewhere by now: where the judge is does not matter
        marked = desk.mark(marker(judge.url), records)
        assert len(judge.requests) == 7
    with serve(in_turn(Answer())) as judge:
        whole = Desk(desk.folder / "whole").mark(marker(judge.url), records)
    assert [one.score for one in marked] == [one.score for one in whole]


def test_an_interrupted_run_waits_for_nobody_and_keeps_what_came(desk: Desk) -> None:
    class Impatient(Desk):
        def advance(self, what: str, done: int) -> None:
            raise KeyboardInterrupt

    records = records_of("full")
    with serve(lambda _, number: Answer(delay_s=0.0 if number == 0 else 20.0)) as judge:
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            Impatient(desk.folder).mark(marker(judge.url, timeout_s=30.0), records)
        assert time.monotonic() - start < 10
    assert len(desk.kept()) == 1
    with serve(in_turn(Answer())) as judge:
        desk.mark(marker(judge.url), records)
        assert len(judge.requests) == 11


def test_other_judges_and_prompts_are_kept_apart(desk: Desk) -> None:
    other = MtBenchRubric(
        JudgePrompts({**mt_bench_prompts().texts, "single-v1": ("", "{question} {answer}")}, "own"),
        {},
    )

    def run(judge: Judge, **values: Any) -> None:
        desk.mark(marker(judge.url, **values), records_of("full"))

    with serve(in_turn(Answer())) as judge:
        run(judge)
        run(judge, temperature=0.7)
        run(judge, body={"seed": 1})
        desk.mark(JudgeMarker(marker(judge.url).judge, other), records_of("full"))
        assert len(judge.requests) == 48
        run(judge, timeout_s=4.0, concurrency=1)
        assert len(judge.requests) == 48
    assert len(list(desk.folder.glob("*.jsonl"))) == 4


def test_the_key_is_written_nowhere(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with serve(in_turn(Answer())) as judge:
        end = marker(judge.url, key_env="JUDGE_KEY")
        marked = desk.mark(end, records_of("full"))
        assert judge.keys[0] == "Bearer s3cret"
    everything = json.dumps([judge_facts(end, marked), [one.to_json() for one in marked]]) + repr(end.judge)
    assert "s3cret" not in everything + "".join(path.read_text() for path in desk.folder.iterdir())
