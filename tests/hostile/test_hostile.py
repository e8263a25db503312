"""A small part of `python -m tests.hostile`: nothing is read as something else, hangs, or raises bare."""

import pytest

from .__main__ import WRONG, run, table
from .attacks import ATTACKS
from .victims import VICTIMS, Victim


@pytest.mark.parametrize("kind", VICTIMS)
def test_nothing_is_silently_other(kind):
    found = run([kind], 40, seed=1)
    wrong = [case for case in found if case.outcome in WRONG]
    assert not wrong, table(found)
    assert {case.outcome for case in found} == {"refused", "same"} or all(
        case.outcome == "refused" for case in found
    )


def test_the_count_can_fail(monkeypatch):
    """A reader that takes whatever stands there is found out."""

    def read(folder):
        with (folder / "a.jsonl").open("rb") as file:
            return file.read(1 << 20)  # a device has no end

    trusting = Victim(VICTIMS["answers"].make, read)
    monkeypatch.setitem(VICTIMS, "answers", trusting)
    outcomes = {case.outcome for case in run(["answers"], 60, seed=0)}
    assert {"other", "bare"} <= outcomes


def test_every_attack_is_tried():
    assert {case.attack for case in run(["ledger"], 60, seed=0)} == set(ATTACKS)
