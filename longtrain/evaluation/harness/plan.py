"""What is decoded together, in what order: fixed by the settings alone, so that every run makes the same."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Measured, Task
from longtrain.settings import Count, convert
from longtrain.systems import System

Place = tuple[str, str]
"""(task, example)."""


@dataclass(frozen=True)
class Unit:
    """Examples of one task that are run together.

    Args:
        task: theirs.
        examples: at least one, all of one temperature.
    """

    task: Task | Measured
    examples: tuple[Example, ...]

    @property
    def key(self) -> str:
        """Its name in a ledger: the task and a hash of the examples."""
        names = "\n".join(example.id for example in self.examples)
        return f"{self.task.name}:{hashlib.sha256(names.encode()).hexdigest()[:12]}"

    @property
    def places(self) -> list[Place]:
        """Every (task, example) of it."""
        return [(self.task.name, example.id) for example in self.examples]

    @property
    def temperature(self) -> float | None:
        """The temperature of its examples; None: the run's own."""
        return _temperature(self.task, self.examples[0])

    def split(self, size: int) -> list[Unit]:
        """The same examples in units of at most `size`."""
        starts = range(0, len(self.examples), size)
        return [replace(self, examples=self.examples[at : at + size]) for at in starts]


def plan(suite: Suite, *, batch: int) -> list[Unit]:
    """Every example of a suite once.

    Inside a task longer examples come first, so that a batch's are of like length and a lack of memory shows
    at once.

    Args:
        suite: to be run.
        batch: most examples of a unit.

    Raises:
        ConfigError: a batch below 1.
    """
    size: int = convert(batch, Count, "suite.batch")
    return [unit for task in suite.tasks for unit in _units(task, size)]


def part_of(units: list[Unit], *, shard: int, shards: int) -> list[Unit]:
    """The units of part `shard` of `shards`: every `shards`-th, so that all parts get short and long ones."""
    return units[shard::shards]


def places_for(units: Sequence[Unit], system: System) -> set[Place]:
    """Every (task, example) of the units that a system is run on."""
    return {place for unit in units if unit.task.serves(system) for place in unit.places}


def remaining(units: list[Unit], done: Collection[Place]) -> list[Unit]:
    """What is left of the units where some examples are done.

    With the batch of the run that was cut off, whole units are left; with another one, parts of units.
    """
    left = []
    for unit in units:
        rest = tuple(one for one in unit.examples if (unit.task.name, one.id) not in done)
        if rest:
            left.append(replace(unit, examples=rest))
    return left


def groups(systems: Sequence[System]) -> list[list[System]]:
    """Systems that are run together, unit by unit: those that differ in their budget alone."""
    found: dict[str, list[System]] = {}
    for system in systems:
        found.setdefault(system.family if system.budget else system.name, []).append(system)
    return list(found.values())


def lanes(systems: Sequence[System], units: Sequence[Unit]) -> list[tuple[list[System], list[Unit]]]:
    """The order of a run: which systems run together on which units, the full cache first.

    Units whose figures follow from the full cache's own come last, for all systems together.

    Args:
        systems: the full cache first.
        units: of all tasks.
    """
    beside = [unit for unit in units if isinstance(unit.task, Measured) and unit.task.against_full]
    alone = [unit for unit in units if not (isinstance(unit.task, Measured) and unit.task.against_full)]
    found = [(group, alone) for group in groups(systems)] if alone else []
    return [*found, (list(systems), beside)] if beside else found


def _units(task: Task | Measured, batch: int) -> Iterator[Unit]:
    groups: dict[float | None, list[Example]] = {}
    for example in task.examples():
        groups.setdefault(_temperature(task, example), []).append(example)
    for heat in sorted(groups, key=lambda value: -1.0 if value is None else value):
        ranked = sorted(groups[heat], key=lambda one: (-task.size(one), one.id))
        for first in range(0, len(ranked), batch):
            yield Unit(task, tuple(ranked[first : first + batch]))


def _temperature(task: Task | Measured, example: Example) -> float | None:
    return task.temperature(example) if isinstance(task, Task) else None
