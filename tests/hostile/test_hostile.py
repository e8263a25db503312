"""A small part of `python -m tests.hostile`: nothing is read as something else, hangs, or raises bare."""

import pytest

from . import __main__ as attacking
from . import scenarios
from .__main__ import WRONG, run, table
from .attacks import ATTACKS
from .victims import VICTIMS, Victim


@pytest.mark.parametrize("kind", VICTIMS)
def test_nothing_is_silently_other(kind):
    found = run([kind], 24, seed=1)
    wrong = [case for case in found if case.outcome in WRONG]
    assert not wrong, table(found)
    assert {case.outcome for case in found} == {"refused", "same"} or all(
        case.outcome == "refused" for case in found
    )


CASES = {"names": 60, "links": 30, "two processes of a name": 12, "kills": 12, "push": 2}
"""How many of each scenario are done here; ranks that train take longer."""


@pytest.mark.parametrize("kind", [*CASES, pytest.param("two ranks", marks=pytest.mark.slow)])
def test_nothing_is_lost(kind):
    found = run([kind], CASES.get(kind, 2), seed=1)
    assert not [case for case in found if case.outcome in WRONG], table(found)


def test_a_scenario_can_fail(monkeypatch):
    """Results that are written over in place are found out."""

    def write(self, key, payload):
        self.done[key] = payload
        (self.folder / "x.0.jsonl").write_text("half of a li")

    monkeypatch.setattr(scenarios.ResultsJournal, "put", write)
    found = run(["kills"], 20, seed=1)
    assert {case.attack for case in found if case.outcome in WRONG} == {"results"}


def test_the_count_can_fail(monkeypatch):
    """A reader that takes whatever stands there is found out."""

    def read(folder):
        with (folder / "a.jsonl").open("rb") as file:
            return file.read(1 << 20)  # a device has no end

    monkeypatch.setattr(attacking, "SECONDS", 1)  # it waits for what never comes
    trusting = Victim(VICTIMS["answers"].make, read)
    monkeypatch.setitem(VICTIMS, "answers", trusting)
    outcomes = {case.outcome for case in run(["answers"], 60, seed=0)}
    assert {"other", "bare"} <= outcomes


def test_every_attack_is_tried():
    assert {case.attack for case in run(["results journal"], 60, seed=0)} == set(ATTACKS)
