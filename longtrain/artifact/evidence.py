"""Reads and writes `evidence.json` of an artifact: its training curves and evaluation results."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from longtrain.errors import ArtifactError
from longtrain.files import read_sealed, sealed
from longtrain.settings import from_file

EVIDENCE = "evidence.json"
MOST_POINTS = 120
"""Largest number of points of a stored curve."""


@dataclass(frozen=True)
class Curve:
    """A metric over the optimizer steps of a training run.

    Args:
        steps: optimizer step of each point.
        values: value of each point.
    """

    steps: list[int]
    values: list[float]

    def __post_init__(self) -> None:
        if not len(self.steps) == len(self.values) > 0 or not all(map(math.isfinite, self.values)):
            raise ValueError("a curve has a value, which is a number, at each of its steps")

    def thinned(self) -> Curve:
        """Return at most `MOST_POINTS` points, evenly chosen, with the last one."""
        last = len(self.steps) - 1
        count = min(len(self.steps), MOST_POINTS)
        kept = [last * i // max(1, count - 1) for i in range(count)]
        return Curve([self.steps[i] for i in kept], [self.values[i] for i in kept])


@dataclass(frozen=True)
class Measurement:
    """The result of an evaluation of the module.

    Args:
        suite: name of the evaluation suite.
        title: title of the result.
        target: the target's name.
        dtype: the target's precision.
        protocol: hash of everything that prompts, decoding and scores depend on.
        command: the command that measured it.
        commit: the code's commit; empty if unknown.
        notes: notes of the result.
        header: headings of the table.
        rows: cells of the table, one line for each system.
        pictures: names of PNG files beside the card.
        machine: its GPUs, or CPU; empty if unknown, as in older files.
    """

    suite: str
    title: str
    target: str
    dtype: str
    protocol: str
    command: str
    commit: str
    notes: list[str]
    header: list[str]
    rows: list[list[str]]
    pictures: list[str] = field(default_factory=list)
    machine: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.header) for row in self.rows):
            raise ValueError("a table has a cell in each row for each of its headings")


@dataclass(frozen=True)
class Evidence:
    """Curves and evaluation results of a module.

    Args:
        curves: training curves by name.
        results: evaluation results.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    results: list[Measurement] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return sealed(asdict(self))

    @classmethod
    def of_folder(cls, folder: Path) -> Evidence:
        """Read the evidence in a folder; empty if the file is missing.

        Raises:
            ArtifactError: the file is damaged.
        """
        path = folder / EVIDENCE
        if not path.is_file():
            return cls()
        try:
            found: Evidence = from_file(cls, read_sealed(path))
            return found
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read: {error}; export again, or remove it") from None
