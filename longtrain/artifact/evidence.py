"""`evidence.json` of an artifact: how its training went and what was measured with it, for its readers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from longtrain.errors import ArtifactError
from longtrain.files import read_sealed, sealed
from longtrain.settings import from_file

EVIDENCE = "evidence.json"
MOST_POINTS = 120
"""Points of a curve that are kept."""


@dataclass(frozen=True)
class Curve:
    """A figure over the optimizer steps of a training run.

    Args:
        steps: of its points.
        values: as many.
    """

    steps: list[int]
    values: list[float]

    def __post_init__(self) -> None:
        if not len(self.steps) == len(self.values) > 0 or not all(map(math.isfinite, self.values)):
            raise ValueError("a curve has a value, which is a number, at each of its steps")

    def thinned(self) -> Curve:
        """At most `MOST_POINTS` points, evenly chosen, the last one among them."""
        last = len(self.steps) - 1
        count = min(len(self.steps), MOST_POINTS)
        kept = [last * i // max(1, count - 1) for i in range(count)]
        return Curve([self.steps[i] for i in kept], [self.values[i] for i in kept])


@dataclass(frozen=True)
class Measurement:
    """A finished evaluation in which the module ran.

    Args:
        suite: its name.
        title: what the result may be called.
        target: the target's name.
        dtype: the target's precision.
        protocol: hash of all that prompts, decoding and scores follow from.
        command: that measured it.
        commit: of the code; empty: not known.
        notes: that the result comes with.
        header: of the table.
        rows: a line a system.
        pictures: names of PNG files beside the card.
        machine: its GPUs, or CPU; empty: not known, as in files that were written before it was kept.
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
    """What is known of a module beside its weights.

    Args:
        curves: of its training, by name.
        results: of its evaluations.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    results: list[Measurement] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """The file's content."""
        return sealed(asdict(self))

    @classmethod
    def of_folder(cls, folder: Path) -> Evidence:
        """What a folder holds; nothing where it has no such file.

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
