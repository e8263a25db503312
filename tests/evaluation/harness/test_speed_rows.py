"""What is timed is what the suite ran: the same prompts, ends, temperatures and coins."""

from __future__ import annotations

import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.harness import answers as running
from longtrain.evaluation.harness import speed
from longtrain.evaluation.harness.speed import WARMUP_TOKENS, SpeedTest
from longtrain.systems import FULL_CACHE

from .toys import suite, task

NEW = WARMUP_TOKENS + 4


def test_the_same_is_asked_as_in_the_suite(session, target, monkeypatch):
    asked = []

    class Heard(Engine):
        def generate(self, prompts, **settings):
            asked.append({"prompts": [list(ids) for ids in prompts], **settings})
            return super().generate(prompts, **settings)

    monkeypatch.setattr(running, "Engine", Heard)
    monkeypatch.setattr(speed, "Engine", Heard)
    warm = task(examples=3, new=NEW, stops=("\n",), min_new_tokens=NEW, temperature=0.7)
    made = session(asked=suite(warm), entries=(), sampling=Sampling(seed=5), batch=3)
    made.work()
    expected, asked[:] = sorted(asked, key=lambda one: min(one["sequence_ids"])), []
    test = SpeedTest(target, [FULL_CACHE], made.suite, made.sampling, prompts=3, batches=[1])
    (row,) = test.rows()
    warmups, timed = asked[::2], asked[1::2]  # each prompt is first read once by plain decoding
    assert {one["max_new_tokens"] for one in warmups} == {WARMUP_TOKENS}
    assert {one["min_new_tokens"] for one in warmups} == {WARMUP_TOKENS}
    assert [one["prompts"] for one in warmups] == [one["prompts"] for one in timed]
    assert len(timed) == 3 and len(expected) == 1 and row["prompts"] == 3

    def prompts_of(some):
        return {
            pair
            for one in some
            for pair in zip(one.pop("sequence_ids"), map(tuple, one.pop("prompts")), strict=True)
        }

    assert prompts_of(timed) == prompts_of(expected) and all(one == expected[0] for one in timed)
    assert {one["sampling"].temperature for one in timed} == {0.7}
    assert all(one["stop_ids"][-1] == target.tokenizer.encode("\n")[0] for one in timed)
    assert test.steps == 3


def test_each_batch_is_timed_and_a_task_with_fewer_prompts_has_some_of_them_again(
    session, target, monkeypatch
):
    asked = []

    class Heard(Engine):
        def generate(self, prompts, **settings):
            asked.append((list(map(tuple, prompts)), list(settings["sequence_ids"])))
            return super().generate(prompts, **settings)

    monkeypatch.setattr(speed, "Engine", Heard)
    made = session(asked=suite(task(examples=3)), entries=())
    told = []
    test = SpeedTest(target, [FULL_CACHE], made.suite, made.sampling, prompts=3, batches=[1, 2, 5])
    rows = test.rows(lambda what, done: told.append((what, done)))
    assert [(row["batch"], row["prompts"]) for row in rows] == [(1, 3), (2, 3), (5, 3)]
    assert [len(prompts) for prompts, _ in asked] == [1] * 6 + [2] * 4 + [5] * 2  # with warm-ups
    prompts, ids = asked[-1]
    assert prompts[3:] == prompts[:2] and len(set(ids)) == 5
    assert test.steps == sum(done for _, done in told) == 3 + 4 + 5
    assert told[-1][0].endswith("copy x 5")


def test_what_a_system_learns_is_kept_from_batch_to_batch(session, target, monkeypatch):
    """`decode=auto` is timed as in an engine that has decoded before, though each batch has a new one."""
    learned: dict[bool, set[int]] = {False: set(), True: set()}

    class Heard(Engine):
        def generate(self, prompts, **settings):
            learned[self.parts.evictor is not None].add(id(self.costs))
            return super().generate(prompts, **settings)

    monkeypatch.setattr(speed, "Engine", Heard)
    made = session(asked=suite(task(examples=3)))
    SpeedTest(target, made.systems, made.suite, made.sampling, prompts=3, batches=[1, 2]).rows()
    assert [len(learned[evicts]) for evicts in (False, True)] == [1, 1] and learned[False] != learned[True]


def test_answers_of_a_stated_length_go_on_past_the_end(session, target):
    made = session(asked=suite(task(examples=2, new=NEW, stop_strings=("a", "b"))), entries=())
    test = SpeedTest(target, [FULL_CACHE], made.suite, made.sampling, prompts=2, tokens=9)
    (row,) = test.rows()
    assert row["max_new_tokens"] == 9 and row["metrics"]["full"]["tokens"] == 2 * 8


def test_a_batch_that_does_not_fit_is_told_and_the_others_go_on(session, target, monkeypatch):
    class Small(Engine):
        def generate(self, prompts, **settings):
            if len(prompts) * (2 if self.parts.evictor else 1) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().generate(prompts, **settings)

    monkeypatch.setattr(speed, "Engine", Small)
    made = session(asked=suite(task(examples=3)))
    test = SpeedTest(target, made.systems, made.suite, made.sampling, prompts=1, batches=[2, 4, 8])
    two, four, eight = (row["metrics"] for row in test.rows())
    failed = {"failed": "out of memory"}
    assert two["snapkv@40"]["ratio"] > 0
    assert four["full"]["ratio"] == 1.0 and four["snapkv@40"] == failed
    assert eight == {"full": failed, "snapkv@40": failed}
