"""What is timed is what the suite ran: the same prompts, ends, temperatures and coins."""

from __future__ import annotations

from longtrain.decoding.engine import Engine
from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.harness import answers as running
from longtrain.evaluation.harness import speed
from longtrain.evaluation.harness.speed import WARMUP_TOKENS, SpeedTest
from longtrain.evaluation.task import Task
from longtrain.systems import FULL_CACHE

from .toys import suite, task

NEW = WARMUP_TOKENS + 4


class Warm(Task):
    def temperature(self, example):
        return 0.7 if example.id.endswith("-0") else None


def test_the_same_is_asked_as_in_the_suite(session, target, monkeypatch):
    asked = []

    class Heard(Engine):
        def generate(self, prompts, **settings):
            asked.append({"prompts": [list(ids) for ids in prompts], **settings})
            return super().generate(prompts, **settings)

    monkeypatch.setattr(running, "Engine", Heard)
    monkeypatch.setattr(speed, "Engine", Heard)
    warm = Warm(**vars(task(examples=3, new=NEW, stops=("\n",), min_new_tokens=NEW)))
    made = session(asked=suite(warm), entries=(), sampling=Sampling(seed=5), batch=3)
    made.work()
    want, asked[:] = sorted(asked, key=lambda one: min(one["sequence_ids"])), []
    test = SpeedTest(target, [FULL_CACHE], made.suite, made.sampling, prompts=3, batch=2)
    (row,) = test.rows()
    (short, *timed) = asked
    assert short["max_new_tokens"] == short["min_new_tokens"] == WARMUP_TOKENS
    assert len(timed) == len(want) == 2 and row["prompts"] == 3
    for one, other in zip(sorted(timed, key=lambda one: min(one["sequence_ids"])), want, strict=True):
        pairs = [
            dict(zip(each.pop("sequence_ids"), each.pop("prompts"), strict=True)) for each in (one, other)
        ]
        assert pairs[0] == pairs[1] and one == other
    assert {one["sampling"].temperature for one in timed} == {0.0, 0.7}
    assert all(one["stop_ids"][-1] == target.tokenizer.encode("\n")[0] for one in timed)
    assert test.steps == 3
