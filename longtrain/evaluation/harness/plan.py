"""The batches of an evaluation and their order, which depend on the settings only."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Measured, Task
from longtrain.systems import System

Place = tuple[str, str]
"""(task, example)."""


@dataclass(frozen=True)
class Unit:
    """A unit of work: examples of one task that are run together as one batch.

    Args:
        task: the examples' task.
        examples: at least one.
    """

    task: Task | Measured
    examples: tuple[Example, ...]

    @property
    def key(self) -> str:
        """The unit's key in a results journal: the task and a hash of the examples."""
        names = "\n".join(example.id for example in self.examples)
        return f"{self.task.name}:{hashlib.sha256(names.encode()).hexdigest()[:12]}"

    @property
    def places(self) -> list[Place]:
        """(task, example) for every example of the unit."""
        return [(self.task.name, example.id) for example in self.examples]


def plan(suite: Suite, *, batch: int) -> list[Unit]:
    """Divide a suite into units that contain every example once.

    Within a task longer examples come first, so that a batch has similar lengths and a lack of memory shows
    at once.

    Args:
        suite: the suite to run.
        batch: the maximum number of examples in a unit.
    """
    return [unit for task in suite.tasks for unit in _units(task, batch)]


def part_of(units: list[Unit], *, shard: int, shards: int) -> list[Unit]:
    """The units of part `shard` of `shards`: every `shards`-th unit, so that each part has short and long
    ones.
    """
    return units[shard::shards]


def places_for(units: Sequence[Unit], system: System) -> set[Place]:
    """(task, example) for every example of the units that a system is run on."""
    return {place for unit in units if unit.task.serves(system) for place in unit.places}


def remaining(units: list[Unit], done: Collection[Place]) -> list[Unit]:
    """The units without the examples that are done.

    If the interrupted run had the same batch size, whole units remain, otherwise parts of units.
    """
    left = []
    for unit in units:
        rest = tuple(one for one in unit.examples if (unit.task.name, one.id) not in done)
        if rest:
            left.append(replace(unit, examples=rest))
    return left


def groups(systems: Sequence[System]) -> list[list[System]]:
    """Group systems that differ only in their budget; a group is run together, unit by unit."""
    found: dict[str, list[System]] = {}
    for system in systems:
        found.setdefault(system.family if system.budget else system.name, []).append(system)
    return list(found.values())


def _units(task: Task | Measured, batch: int) -> Iterator[Unit]:
    ranked = sorted(task.examples(), key=lambda one: (-task.size(one), one.id))
    for first in range(0, len(ranked), batch):
        yield Unit(task, tuple(ranked[first : first + batch]))
