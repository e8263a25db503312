"""Changes of slots: the kernel, interpreted, beside torch."""

from slot_assignment_cases import same_as_torch


def test_slots_change_as_in_torch():
    same_as_torch("cpu", rows=10, length=45, steps=6)
