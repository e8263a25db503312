"""Scores of stored answers beside what RULER's own scorer gives for them."""

from __future__ import annotations

import json
from random import Random

import pytest

from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.records import Record, Turn
from longtrain.evaluation.reporting.examples import examples
from longtrain.evaluation.suites import eviction, needle, ruler
from longtrain.systems import System
from longtrain.systems.system import FULL
from tests.evaluation.scoring.official_ruler import main, rescored

ANSWERS = (
    "{0}",
    "1. {0}\n2. 1234567",
    " are: {1}, {0}.",
    "It's {0}{1}",
    "none of these",
    "",
    "\x00{0}\t",
    "{1}",
)


def answer(values: list[str], number: int) -> str:
    text = ANSWERS[number % len(ANSWERS)].format(values[0], values[-1])
    return text.upper() if number % 3 == 0 else text


@pytest.fixture(scope="module", params=["needle", "eviction", "ruler"])
def suite(request, tiny, settings_of):
    few = {
        "needle": (needle, {"lengths": [512], "depths": [0, 50], "needles": [1, 2], "prompts": 8}),
        "eviction": (eviction, {"lengths": [512, 600], "prompts": 64, "oracle": False}),
        "ruler": (ruler, {"lengths": [1100], "samples": 8, "tasks": ["niah_multivalue", "vt", "cwe"]}),
    }
    module, changed = few[request.param]
    return module.build(settings_of(request.param, **changed), tiny, seed=0, sampling=Sampling())


def test_stored_scores_are_the_official_ones(suite, tiny, tmp_path, capsys) -> None:
    records, rng = [], Random(0)
    for task in suite.tasks:
        for one in task.examples():
            text = answer(task.references(one), rng.randrange(100))
            turn = Turn(text, (1,), "stop", 5, 5.0)
            score = task.score(text, one)
            assert score is not None
            records.append(Record("full", task.name, one.id, task.facets(one), turns=(turn,), score=score))
    rooms = {task.name: 4096 for task in suite.tasks}
    made = examples(suite, [System("full", FULL, "full")], records, tiny.tokenizer, max_tokens=rooms)
    lines = [json.loads(json.dumps(line)) for line in made]
    found = rescored(lines, "full")
    assert len(found) == {"needle": 2, "eviction": 8, "ruler": 3}[suite.name]
    for name, (stored, official) in found.items():
        assert stored == official and 0 < stored < 100, name
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(str(tmp_path)) == 0 and "| full |" in capsys.readouterr().out
    lines[0]["outputs"]["full"]["score"] += 0.5
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(str(tmp_path)) == 1
