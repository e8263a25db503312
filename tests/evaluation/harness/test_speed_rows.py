"""What is timed is what the suite ran: the same prompts, ends, temperatures and coins."""

from __future__ import annotations

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
    test = SpeedTest(target, [FULL_CACHE], made.suite, made.sampling, prompts=3, batch=2)
    (row,) = test.rows()
    (short, *timed) = asked
    assert short["max_new_tokens"] == short["min_new_tokens"] == WARMUP_TOKENS
    assert len(timed) == 2 and len(expected) == 1 and row["prompts"] == 3

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
