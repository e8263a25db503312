"""What a result may be called: each departure of a run from a benchmark as it was published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.published import Published
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Task, rows_sha256

ROWS = tuple(Example(str(i), {"text": f"{i}"}) for i in range(3))
ASKED = {"chat": True, "seed": 42, "lengths": (4096,), "words": "own"}
WHOLE = Published(
    "B",
    tasks={"a": 3, "b": 3, "c": None, "d": 3, "e": 3},
    sha256={"a": rows_sha256(ROWS)[:16]},
    lengths=(4096, 8192),
    settings={"chat": True, "seed": 42, "words": "own", "retries": 1},
)


def called(rows=None, sampling=Sampling(), published=WHOLE, **changed):  # noqa: B008 (frozen)
    rows = {**dict.fromkeys("abcde", ROWS), **(rows or {})}
    return published.departures(
        {name: some for name, some in rows.items() if some}, {**ASKED, **changed}, sampling
    )


def test_the_whole_benchmark_has_no_departure() -> None:
    assert called() == called({"c": ROWS[:1]}) == called(sampling=Sampling(0.0, top_p=0.5)) == []
    assert Published("B").departures({"x": ROWS}, {}, Sampling()) == []


@pytest.mark.parametrize(
    ("changed", "notes"),
    [
        ({"rows": {"b": (), "d": ()}}, ["3 of 5 tasks"]),
        ({"rows": {"b": ROWS[:1], "d": ROWS[:2]}}, ["3 of 6 examples of b, d"]),
        ({"rows": dict.fromkeys("abde", ROWS[:1])}, ["4 of 12 examples of 4 tasks"]),
        ({"rows": {"b": (*ROWS, ROWS[0])}}, ["4 of 3 examples of b"]),
        ({"rows": {"a": ROWS[::-1]}}, ["examples of a that are not the published ones"]),
        ({"lengths": (1536, 4096)}, ["lengths that are not published: 1536"]),
        ({"chat": False}, ["without chat template"]),
        ({"seed": 1, "words": "x"}, ["suite.seed=1 instead of 42", "suite.words=x instead of own"]),
        ({"retries": 5}, ["suite.retries=5 instead of 1"]),
        ({"sampling": Sampling(0.5, top_k=9)}, ["sampled (temperature 0.5, top_k 9), not greedy"]),
    ],
)
def test_each_departure_is_said(changed, notes) -> None:
    assert called(**changed) == notes


def test_a_departure_or_a_cut_prompt_makes_a_variant() -> None:
    tasks = [
        Task(name, ROWS, "{text}", 4, "f1", None, max_prompt_tokens=n) for name, n in (("a", 8), ("b", 9))
    ]
    suite = Suite("s", tuple(tasks), title="B", notes=("of a copy",))

    def records(*cut):
        return {name: [Record("full", name, row.id, {}, cut=name in cut) for row in ROWS] for name in "ab"}

    def named(suite, *cut):
        found = suite.summary(records(*cut))
        return found.title, found.notes

    assert named(suite) == ("B", ("of a copy",))
    assert named(replace(suite, title="")) == ("s", ("of a copy",))
    assert named(replace(suite, departures=["sampled"])) == ("Variant of B", ("sampled", "of a copy"))
    assert named(suite, "a") == ("Variant of B", ("3 of 6 prompts cut to 8 tokens", "of a copy"))
    assert named(suite, "a", "b")[1][0] == "6 of 6 prompts cut to 8 to 9 tokens"
    assert named(replace(suite, cuts=True), "a") == ("B", ("of a copy",))
