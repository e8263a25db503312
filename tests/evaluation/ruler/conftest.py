"""The bundled tokenizer, and question files in the official formats with answers that can be read off."""

from __future__ import annotations

import json
from random import Random

import pytest

from longtrain.assets import asset_dir
from longtrain.evaluation.ruler.generate import Generator
from longtrain.evaluation.ruler.questions import DATASETS
from longtrain.evaluation.ruler.sizing import Framing, Material
from longtrain.evaluation.ruler.sources import Haystack
from longtrain.evaluation.ruler.tasks import TASKS


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(asset_dir("bundled") / "tiny")


@pytest.fixture(scope="session")
def haystack():
    return Haystack.bundled()


def names(seed: int, count: int) -> list[str]:
    """Different made-up words."""
    rng = Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        pairs = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(4)]
        found["".join(pairs).capitalize()] = None
    return list(found)


PLACES = names(1, 400)
TRADES = [name.lower() for name in names(2, 400)]


def passage(which: int, rng: Random) -> str:
    """A document that answers what the main trade of a place is."""
    before, after = (
        f"People have lived there for {rng.randrange(10, 900)} years. " * rng.randrange(4) for _ in "ab"
    )
    return f"{before}The main trade of {PLACES[which]} is {TRADES[which]}. {after}".strip()


@pytest.fixture(scope="session")
def squad_rows():
    """SQuAD 2.0: 40 articles of 8 paragraphs, one question each, and one that has no answer."""
    rng = Random(3)
    articles = []
    for first in range(0, 320, 8):
        paragraphs = []
        for which in range(first, first + 8):
            answers = [
                {"text": TRADES[which], "answer_start": 0},
                {"text": f"{TRADES[which]}.", "answer_start": 0},
            ]
            question = f"What is the main trade of {PLACES[which]}?"
            rows = [
                {"question": question, "id": str(which), "answers": answers, "is_impossible": False},
                {"question": "Who rules it?", "id": f"{which}n", "answers": [], "is_impossible": True},
            ]
            paragraphs.append({"context": passage(which, rng), "qas": rows})
        articles.append({"title": f"Article {first}", "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


@pytest.fixture(scope="session")
def hotpot_rows():
    """HotpotQA: 120 questions with ten documents each, one of which answers."""
    rng = Random(4)
    rows = []
    for which in range(120):
        near = rng.sample([i for i in range(400) if i != which], 9)
        documents = [[f"On {PLACES[i]}", ["It is a place. ", passage(i, Random(i))]] for i in [which, *near]]
        question = f"What is the main trade of {PLACES[which]}?"
        rows.append({"_id": str(which), "question": question, "answer": TRADES[which], "context": documents})
    return rows


@pytest.fixture(scope="session")
def questions(tmp_path_factory, squad_rows, hotpot_rows):
    folder = tmp_path_factory.mktemp("questions")
    (folder / "squad.json").write_text(json.dumps(squad_rows))
    (folder / "hotpotqa.json").write_text(json.dumps(hotpot_rows))
    names = {"qa_1": "squad", "qa_2": "hotpotqa"}
    return {task: DATASETS[name].read(folder / f"{name}.json") for task, name in names.items()}


@pytest.fixture(scope="session")
def make(tokenizer, haystack, questions):
    """`make(task, length=..., n=..., start=..., chat=...)`: a list of examples."""

    def call(task, *, length, n=2, start=0, chat=None, **options):
        framing = Framing(tokenizer, chat=chat)
        known = {"haystack": haystack, "questions": questions.get(task), **options}
        generator = Generator(Material(TASKS[task], length, framing, **known))
        return [generator.example(index) for index in range(start, start + n)]

    return call
