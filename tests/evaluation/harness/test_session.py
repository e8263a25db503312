"""Sessions: resumed, sharded and extended runs give the same bytes; what was recorded is held to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.evaluation.harness import answers as running
from longtrain.evaluation.harness import recorded
from longtrain.evaluation.harness.run import Room, StoppedError
from longtrain.evaluation.harness.speed import SpeedTest
from longtrain.evaluation.task import Example, Measured, Task, sequence_id
from longtrain.files import as_json
from longtrain.methods.policies import snapkv
from longtrain.methods.policies.oracle import QuestionOracle
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.systems import Builder

from .toys import suite, task


def whole(session):
    """Bytes of the result and the examples of finished work."""
    session.work()
    outcome = session.finish()
    return as_json(outcome.results), outcome.examples


class Counted(Engine):
    """Counts the prompts decoded."""

    prompts = 0

    def generate(self, prompts, **settings):
        Counted.prompts += len(prompts)
        return super().generate(prompts, **settings)


@pytest.fixture
def counted(monkeypatch):
    Counted.prompts = 0
    monkeypatch.setattr(running, "Engine", Counted)
    return Counted


def test_records_are_what_the_engine_says(session, target):
    made = session(entries=())
    made.work()
    records = made.records()
    assert [(r.task, r.example) for r in records] == [
        (t.name, e.id) for t in made.suite.tasks for e in t.examples()
    ]
    tasks = {t.name: t for t in made.suite.tasks}
    for record in records:
        own = tasks[record.task]
        example = next(e for e in own.examples() if e.id == record.example)
        ids = own.encode(example, target.tokenizer, max_tokens=100).ids
        (turn,) = record.turns
        alone = Engine(target).generate([ids], max_new_tokens=6)
        assert list(turn.tokens) == alone.tokens[0] and turn.finish == alone.finish[0]
        assert turn.text == target.tokenizer.decode(turn.tokens, skip_special_tokens=True)
        assert record.prompt_tokens == turn.kept_entries == len(ids)
        assert record.score == own.score(turn.text, example)
        assert record.cycles is None


def test_a_run_that_was_cut_off_goes_on_without_repeating_anything(session, counted):
    expected = whole(session("one"))
    every = counted.prompts
    assert every == 16
    counted.prompts = 0
    cut = session("two")
    budget = iter(range(3))
    with pytest.raises(StoppedError, match="stopped as asked at full, with 11 of 16 examples left"):
        cut.work(stopping=lambda: next(budget, None) is None)
    assert counted.prompts == 5
    assert cut.missing() == {"full": 3, "snapkv@40": 8}
    with pytest.raises(ConfigError, match=r"is not finished.*full: 3 examples, snapkv@40: 8 examples left"):
        cut.finish()
    assert cut.counts() == (16, 5)
    assert whole(session("two")) == expected
    assert counted.prompts == every


@pytest.mark.parametrize("shards", [2, 3])
def test_parts_make_the_whole(session, shards):
    expected = whole(session("one"))
    for number in reversed(range(shards)):
        part = session("parts")
        part.work(shard=number, shards=shards)
        assert bool(part.missing()) == (number > 0)
    outcome = session("parts").finish()
    assert (as_json(outcome.results), outcome.examples) == expected


def test_another_budget_or_system_computes_only_itself(session, counted):
    first = json.loads(whole(session("run"))[0])
    counted.prompts = 0
    more = session("run", entries=("streaming_llm", "snapkv"), budgets=(40, 48))
    found = json.loads(whole(more)[0])
    assert counted.prompts == 3 * 8
    known = {system["name"]: system for system in found["systems"]}
    assert list(known) == ["full", "streaming_llm@40", "streaming_llm@48", "snapkv@40", "snapkv@48"]
    for system in first["systems"]:
        assert known[system["name"]] == system


def test_another_batch_goes_on_with_what_is_left(session, counted):
    cut = session("two")
    budget = iter(range(2))
    with pytest.raises(StoppedError):
        cut.work(stopping=lambda: next(budget, None) is None)
    counted.prompts = 0
    session("two", batch=3).work()
    assert counted.prompts == 16 - 4
    assert not session("two").missing()


def test_another_protocol_is_refused_before_anything_runs(session, counted):
    session("run").work()
    counted.prompts = 0
    with pytest.raises(ConfigError, match=r"protocol\.decoding\.seed=0, and .*=1 is asked for"):
        session("run", sampling=Sampling(seed=1)).work()
    assert counted.prompts == 0


def test_stops_minimum_and_temperature_reach_the_engine(session, target, monkeypatch):
    asked = []

    class Heard(Engine):
        def generate(self, prompts, **settings):
            asked.append(settings)
            return super().generate(prompts, **settings)

    monkeypatch.setattr(running, "Engine", Heard)
    warm = task("warm", examples=1, stops=("\n",), min_new_tokens=2, temperature=0.7)
    usual = task(examples=2, stops=("\n",), min_new_tokens=2)
    made = session(asked=suite(warm, usual), entries=(), sampling=Sampling(seed=5))
    made.work()
    newline = target.tokenizer.encode("\n", add_special_tokens=False)[0]
    assert all(settings["stop_ids"] == (7, newline) for settings in asked)
    assert all(settings["min_new_tokens"] == 2 for settings in asked)
    heats = {id_: s["sampling"].temperature for s in asked for id_ in s["sequence_ids"]}
    expected = {sequence_id(("copy", f"copy-{i}")): 0.0 for i in range(2)}
    expected[sequence_id(("warm", "warm-0"))] = 0.7
    assert heats == expected and all(s["sampling"].seed == 5 for s in asked)


class Crowded(Engine):
    """Has room for two prompts, and for none of 41 tokens, which is that of `copy-4`."""

    calls: list[int] = []

    def generate(self, prompts, **settings):
        Crowded.calls.append(len(prompts))
        if len(prompts) > 2 or any(len(prompt) == 41 for prompt in prompts):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().generate(prompts, **settings)


def test_a_batch_that_does_not_fit_is_halved_and_an_example_that_does_not_is_a_result(session, monkeypatch):
    expected = json.loads(whole(session("roomy", entries=("snapkv",), batch=2))[0])
    monkeypatch.setattr(running, "Engine", Crowded)
    Crowded.calls = []
    made = session("crowded", entries=("snapkv",), batch=4)
    found = json.loads(whole(made)[0])
    sizes, calls = {1, 2}, list(Crowded.calls)
    assert calls.count(4) == 2 and set(calls) <= {4, 3, *sizes}  # one try of each system, then halves
    lost = [record for record in made.records() if record.failed]
    assert {(record.system, record.example) for record in lost} == {
        (system, example) for system in ("full", "snapkv@40") for example in ("copy-4",)
    }
    assert all(record.score is None and record.prompt_sha256 and not record.turns for record in lost)
    for system, whole_ in zip(found["systems"], expected["systems"], strict=True):
        assert system["tasks"][0]["out_of_memory"] == 1 and "out_of_memory" not in system["tasks"][1]
        assert system["tasks"][0]["score"]["n"] == 4 and system["tasks"][1] == whole_["tasks"][1]
    assert any("memory ran out with full in 1 examples" in note for note in found["notes"])
    assert found["baseline"] == {
        "status": "off",
        "measured": None,
        "reason": "memory ran out in 1 examples",
    }
    Crowded.calls = []
    whole(session("crowded", entries=("snapkv",), batch=4))
    assert not Crowded.calls  # what did not fit is a result, and not tried again


def test_a_run_that_goes_on_keeps_to_the_batch_that_fits(session, monkeypatch):
    monkeypatch.setattr(running, "Engine", Crowded)
    asked = suite(task(examples=4), task("more", examples=4))
    cut = session("run", asked, entries=(), batch=4)
    turns = iter(range(1))
    with pytest.raises(StoppedError):
        cut.work(stopping=lambda: next(turns, None) is None)
    Crowded.calls = []
    again = session("run", asked, entries=(), batch=4)
    again.work()
    assert max(Crowded.calls) == 2
    (note,) = again.finish().results["notes"]
    assert note == "memory ran out with full at a batch of 4; the smallest batch was 2"


class Pressed(Engine):
    """Has room for a number of prompts that changes with every call; after the last one it stays."""

    room: list[int] = []
    calls: list[int] = []

    def generate(self, prompts, **settings):
        Pressed.calls.append(len(prompts))
        most = Pressed.room.pop(0) if len(Pressed.room) > 1 else Pressed.room[0]
        if len(prompts) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().generate(prompts, **settings)


@pytest.mark.parametrize(
    ("room", "calls"),
    [
        ([2, 1, 6], [6, 3, 1, 1, 1, 2, 1, 2, 4, 4, 2, 1, 5]),  # memory is short for two calls
        ([2], [6, 3, 1, 1, 1, 2, 1, 2, 4, 2, 2, 2, 2, 2, 1, 2, 3, 1, 1, 1]),  # and here always
    ],
)
def test_a_batch_is_doubled_again_and_refused_once_in_a_task(session, monkeypatch, room, calls):
    """Batches of 6, 6, 6 and 1, then of 5."""
    monkeypatch.setattr(running, "Engine", Pressed)
    Pressed.room, Pressed.calls = list(room), []
    made = session("pressed", suite(task(examples=19), task("more", examples=5)), entries=(), batch=6)
    found = json.loads(whole(made)[0])
    assert Pressed.calls == calls
    assert sum(system["tasks"][0]["score"]["n"] for system in found["systems"]) == 19
    smallest = "memory ran out with full at a batch of 6; the smallest batch was 1"
    assert smallest in found["notes"]


def test_room_is_refused_where_a_doubled_batch_ran_out_and_nowhere_else():
    room = Room(8, 8)

    def sizes(task, count):
        return [room.fitted(task) or room.size for _ in range(count)]

    room.too_large("a", 8)
    assert sizes("a", 3) == [4, 4, 8]
    room.too_large("b", 8)  # doubled in a: it may have been the first of b
    assert sizes("b", 3) == [4, 4, 8]
    room.too_large("b", 8)
    room.too_large("b", 4)
    assert sizes("b", 7) == [2, 2, 4, 4, 4, 4, 4] and sizes("a", 1) == [8]


def test_where_not_even_one_fits_no_batch_is_doubled(session, monkeypatch):
    monkeypatch.setattr(running, "Engine", Pressed)
    Pressed.room, Pressed.calls = [0], []
    whole(session("none", suite(task(examples=6)), entries=(), batch=2))
    assert Pressed.calls == [2, *6 * [1]]


def test_a_journal_without_checksums_is_refused(session):
    asked = suite(task(examples=2))
    whole(session("run", asked, entries=()))
    for file in (session("run", asked).folder / "journals").glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line.pop("sha256")
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LongtrainError, match="line 1 cannot be read: its checksum is missing"):
        whole(session("run", asked, entries=()))


class Counting(SnapKV):
    """Counts how often a batch is scored."""

    scored: ClassVar[list[int]] = []

    def scores(self, run):
        Counting.scored.append(len(run.lengths))
        return super().scores(run)


def test_a_batch_is_scored_once_for_all_budgets(session, monkeypatch):
    plain = session("plain", suite(task(examples=3)), budgets=(33, 40, 48), batch=3)
    expected = whole(plain)
    monkeypatch.setattr(snapkv, "SnapKV", Counting)
    Counting.scored.clear()
    made = session("counted", suite(task(examples=3)), budgets=(33, 40, 48), batch=3)
    assert whole(made) == expected and Counting.scored == [3]
    cut = session("cut", suite(task(examples=3)), budgets=(33, 40, 48), batch=3)
    turns = iter(range(2))
    with pytest.raises(StoppedError, match="6 of 12 examples left"):
        cut.work(stopping=lambda: next(turns, None) is None)
    assert cut.missing() == {"snapkv@40": 3, "snapkv@48": 3}
    assert whole(session("cut", suite(task(examples=3)), budgets=(33, 40, 48), batch=3)) == expected


class After(Task):
    """Asks once rows are evicted, counts how often, and is told what the oracle may know."""

    def encode(self, example, tokenizer, *, max_tokens):
        found = super().encode(example, tokenizer, max_tokens=max_tokens)
        return replace(found, ids=found.ids[:-9], after=found.ids[-9:])

    def answer_ids(self, example, tokenizer):
        return tokenizer.encode(example.fields["text"][-3:])

    def measures(self, text, example):
        return {"letters": float(len(text))}

    def compares_scores(self, examples):
        return True

    def compare_scores(self, target, examples, prompts, s_LBGS):
        assert s_LBGS.shape[1] == len(examples) == len(prompts)
        return [{"slots": float(s_LBGS.shape[-1])} for _ in examples]

    def related(self, record, full, example):
        same = [a == b for a, b in zip(record.turns[0].tokens, full.turns[0].tokens, strict=False)]
        return replace(record, measures={**(record.measures or {}), "same": sum(same) / len(same)})


def told(builder):
    return builder.evicting(
        "oracle", "oracle", QuestionOracle, {"policy": "oracle", "told": True}, timed=False
    )


def test_a_question_after_eviction_and_what_is_known_beside_a_score(session, target):
    asked = suite(After(**vars(task(examples=3, chat=False))))
    builder = Builder(target, [Budget(40), Budget(48)], [], {}.__getitem__)
    made = session(asked=asked, systems=builder.systems(["snapkv"], own=told), batch=3)
    made.work()
    by = {(record.system, record.example): record for record in made.records()}
    ids = [asked.tasks[0].encode(e, target.tokenizer, max_tokens=500) for e in asked.tasks[0].rows]
    alone = Engine(target, builder.systems(["snapkv"])[1].parts).generate(
        [one.ids for one in ids], after=[one.after for one in ids], max_new_tokens=6
    )
    for number, one in enumerate(ids):
        record = by["snapkv@40", f"copy-{number}"]
        assert list(record.turns[0].tokens) == alone.tokens[number]
        assert record.prompt_tokens == len(one.ids) and record.turns[0].kept_entries <= 40
    some = [record.turns[0] for (name, _), record in by.items() if name == "snapkv@40"]
    assert sum(turn.cache_bytes for turn in some) == alone.stats.cache_bytes
    assert sum(turn.full_cache_bytes for turn in some) == alone.stats.cache_bytes_full
    assert by["snapkv@40", "copy-0"].measures["slots"] == max(len(one.ids) for one in ids)
    assert "slots" in by["oracle@40", "copy-0"].measures and "slots" not in by["oracle@48", "copy-0"].measures
    assert all(record.measures["same"] == 1 for record in by.values() if record.system == "full")
    timed = SpeedTest(target, made.systems, asked, Sampling(), tokens=1).timed
    assert {system.name for system in timed} == {"full", "snapkv@40"}


class Numbered(Task):
    def sequence_id(self, example):
        return int(example.id.split("-")[1])


def test_drawn_answers_follow_from_the_seed_and_the_sequence_id(session, target):
    drawn = Numbered(**vars(task(examples=2)))
    sampling = Sampling(temperature=1.0, seed=4)
    made = session(asked=suite(drawn), entries=(), sampling=sampling)
    made.work()
    records = sorted(made.records(), key=lambda record: record.example)
    prompts = [drawn.encode(e, target.tokenizer, max_tokens=100).ids for e in drawn.rows]
    alone = Engine(target).generate(prompts, max_new_tokens=6, sampling=sampling, sequence_ids=[0, 1])
    assert [list(record.turns[0].tokens) for record in records] == alone.tokens
    for record, example in zip(records, drawn.rows, strict=True):
        assert record.score == drawn.score(record.turns[0].text, example)


def test_a_prompt_beyond_the_window_is_named(session, target):
    long = task(examples=1, max_prompt_tokens=10 * target.info.max_positions)
    rows = (Example("giant", {"text": "x" * target.info.max_positions}),)
    with pytest.raises(
        DataError, match=r"task copy, example giant: \d+ tokens of prompt and 6 new ones exceed"
    ):
        session(asked=suite(replace(long, rows=rows)), entries=()).work()


class Lengths(Measured):
    """Counts letters."""

    name = "letters"
    rows = (Example("a", {"text": "abc"}), Example("b", {"text": "d"}))

    def settings(self):
        return {"task": self.name, "rows": 2, "rows_sha256": "x"}

    def measure(self, target, parts, examples):
        return [{"nats": float(len(e.fields["text"])), "tokens": 1.0} for e in examples]


def test_a_measured_task_has_figures_and_no_texts(session):
    made = session(asked=suite(Lengths()), entries=())
    made.work()
    assert [record.measures for record in made.records()] == [
        {"nats": 3.0, "tokens": 1.0},
        {"nats": 1.0, "tokens": 1.0},
    ]
    assert all(not record.turns for record in made.records())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_figure_that_is_no_number_is_named_and_what_is_done_is_kept(session, value):
    class Overflow(Lengths):
        def measure(self, target, parts, examples):
            return [{"nats": 1.0 if example.id == "a" else value, "tokens": 1.0} for example in examples]

    made = session(asked=suite(Overflow()), entries=(), batch=1)
    message = (
        rf"task letters, example b, system full: nats={value}; .* in float32; pass target\.dtype=float32"
    )
    with pytest.raises(DataError, match=message):
        made.work()
    assert made.missing() == {"full": 1}


def test_the_recorded_score_is_held_to(session, monkeypatch):
    made = session("first", record=True)
    found = json.loads(whole(made)[0])
    assert found["baseline"]["status"] == "recorded"
    score = found["systems"][0]["average"]["value"]
    again = json.loads(whole(session("second"))[0])
    assert again["baseline"]["status"] == "equal" and again["baseline"]["recorded"] == score
    path = made.home / recorded.FILE
    values = json.loads(path.read_text())
    values["baselines"][0]["score"] += 60
    path.write_text(json.dumps(values))
    third = session("third")
    with pytest.raises(LongtrainError, match=r"full cache scores \d+\.\d\d in suite toy, and .* is recorded"):
        third.work()
    assert third.missing() == {"snapkv@40": 8}  # no other system ran
    free = json.loads(whole(session("third", check=False))[0])
    assert free["baseline"] == {"status": "off", "measured": None, "reason": "suite.check_baseline=false"}
    path.write_text("{")
    with pytest.raises(DataError, match=r"baselines\.json cannot be read"):
        session("fourth").work()


def test_a_lost_chat_template_is_told_before_anything_runs(session, target, monkeypatch, counted):
    asked = suite(task(chat=False))
    whole(session("first", asked, record=True))
    counted.prompts = 0
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    with pytest.raises(LongtrainError, match=r"another protocol; chat_template: recorded \"\w+\", now null"):
        session("second", asked).work()
    assert counted.prompts == 0
    both = session("third", asked, record=True)
    assert json.loads(whole(both)[0])["baseline"]["status"] == "recorded"
    assert len(json.loads((both.home / recorded.FILE).read_text())["baselines"]) == 2
    assert json.loads(whole(session("fourth", asked))[0])["baseline"]["status"] == "equal"


def test_shipped_scores_name_the_command_that_gave_them(tmp_path):
    entries = recorded.Baselines.load(tmp_path).entries
    assert entries
    for entry in entries:
        assert entry["source"].startswith("longtrain eval target=") and entry["low"] <= entry["score"]
        assert entry["protocol"]["suite"] == entry["suite"] in entry["source"]


def test_other_examples_or_targets_are_not_held_to_it(session):
    whole(session("first", record=True))
    other = json.loads(whole(session("second", suite(task(examples=4))))[0])
    assert other["baseline"]["status"] == "none"


def test_the_result_is_written_by_one_process(session):
    one = session("run")
    one.work()
    with one.finishing() as mine, session("run").finishing() as other:
        assert mine and not other
    with session("run").finishing() as mine:
        assert mine
