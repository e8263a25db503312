"""Sessions: resumed, sharded and extended runs give the same bytes; what was recorded is held to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.evaluation.harness import recorded
from longtrain.evaluation.harness import run as running
from longtrain.evaluation.harness.run import StoppedError, sequence_id
from longtrain.evaluation.task import Example, Measured, Task
from longtrain.files import as_json

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
        assert record.prompt_tokens == turn.kept_rows == len(ids)
        assert record.score == own.score(turn.text, example)
        assert record.cycles is None


def test_a_run_that_was_cut_off_goes_on_without_repeating_anything(session, counted):
    want = whole(session("one"))
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
    assert whole(session("two")) == want
    assert counted.prompts == every


@pytest.mark.parametrize("shards", [2, 3])
def test_parts_make_the_whole(session, shards):
    want = whole(session("one"))
    for number in reversed(range(shards)):
        part = session("parts")
        part.work(shard=number, shards=shards)
        assert bool(part.missing()) == (number > 0)
    outcome = session("parts").finish()
    assert (as_json(outcome.results), outcome.examples) == want
    with pytest.raises(ConfigError, match="shard=2 shards=2; allowed"):
        session("parts").work(shard=2, shards=2)


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


def test_turns_follow_each_other(session, target):
    class Talk(Task):
        def encode(self, example, tokenizer, *, max_tokens, answers=()):
            words = "|".join([example.fields["text"], *answers])
            found = super().encode(Example("x", {"text": words}), tokenizer, max_tokens=max_tokens)
            return found

    made = session(asked=suite(Talk(**vars(task(n_turns=2, examples=3)))), entries=())
    made.work()
    for record in made.records():
        one, two = record.turns
        assert two.prompt_tokens == one.prompt_tokens + 1 + len(one.text.encode())
        assert record.prompt_tokens == one.prompt_tokens


def test_stops_minimum_and_temperature_reach_the_engine(session, target, monkeypatch):
    asked = []

    class Heard(Engine):
        def generate(self, prompts, **settings):
            asked.append(settings)
            return super().generate(prompts, **settings)

    class Warm(Task):
        def temperature(self, example):
            return 0.7 if example.id == "copy-0" else None

    monkeypatch.setattr(running, "Engine", Heard)
    warm = Warm(**vars(task(examples=3, stops=("\n",), min_new_tokens=2)))
    made = session(asked=suite(warm), entries=(), sampling=Sampling(seed=5))
    made.work()
    newline = target.tokenizer.encode("\n", add_special_tokens=False)[0]
    assert all(settings["stop_ids"] == (7, newline) for settings in asked)
    assert all(settings["min_new_tokens"] == 2 for settings in asked)
    heats = {id_: s["sampling"].temperature for s in asked for id_ in s["sequence_ids"]}
    want = {sequence_id(("copy", f"copy-{i}")): 0.7 if i == 0 else 0.0 for i in range(3)}
    assert heats == want and all(s["sampling"].seed == 5 for s in asked)


def test_memory_that_runs_out_is_told_with_what_to_lower(session, monkeypatch):
    made = session(entries=())

    class Full(Engine):
        def generate(self, prompts, **settings):
            if len(prompts) > 1 and settings["max_new_tokens"] == 5:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().generate(prompts, **settings)

    monkeypatch.setattr(running, "Engine", Full)
    made = session(asked=suite(task(examples=2), task("large", examples=2, new=5)), entries=())
    with pytest.raises(ConfigError, match=r"memory ran out in task large with full .*pass suite\.batch=1"):
        made.work()
    assert made.missing() == {"full": 2}
    replace(made, batch=1).work()
    assert not made.missing()


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


class Judge:
    """Gives every answer the same mark."""

    def __init__(self, mark=0.5, away=()):
        self.mark_, self.away, self.seen = mark, list(away), []

    def settings(self):
        return {"judge": "toy"}

    def count(self, records):
        return len(records)

    def course(self):
        return {}

    def mark(self, records, suite, ledger, advance):
        self.seen.append([record.system for record in records])
        if self.away and self.away.pop(0):
            raise LongtrainError("the judge is away")
        return [record.marked(self.mark_, {"judgements": []}) for record in records]


def judged(judge):
    return replace(suite(task(examples=2, judge=None)), marker=judge)


def test_a_judge_reads_the_full_cache_first_and_others_only_if_it_is_as_recorded(session, counted):
    whole(session("first", judged(Judge()), record=True))
    counted.prompts = 0
    judge = Judge()
    assert json.loads(whole(session("second", judged(judge)))[0])["baseline"]["status"] == "equal"
    assert judge.seen == [["full"] * 2, ["full"] * 2, ["snapkv@40"] * 2] and counted.prompts == 4
    counted.prompts = 0
    harsh = Judge(0.1)
    third = session("third", judged(harsh))
    with pytest.raises(
        LongtrainError, match=r"full cache scores 10\.00 in suite toy, and 50\.00 is recorded"
    ):
        third.work()
    assert counted.prompts == 2 and harsh.seen == [["full"] * 2]
    with pytest.raises(LongtrainError, match=r"full cache scores 10\.00"):
        whole(session("first", judged(harsh)))
    assert harsh.seen[1:] == [["full"] * 2]


def test_with_the_judge_away_every_answer_is_there_and_the_comparison_comes_later(session, caplog):
    whole(session("first", judged(Judge()), record=True))
    judge = Judge(away=[True, True, False, False])
    made = session("second", judged(judge))
    made.work()
    assert "the judge is away; the recorded score is compared at the end" in caplog.text
    assert not made.missing()
    with pytest.raises(LongtrainError, match="the judge is away"):
        made.finish()
    assert made.finish().results["baseline"]["status"] == "equal"


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
